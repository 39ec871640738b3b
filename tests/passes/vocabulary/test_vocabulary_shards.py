"""A step whose output layer is sharded computes the loss and the gradients of eager mode."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.pass_graph_runner import Batch, StepResult, eager_step
from tests.support.vocabulary_runner import ShardedRunner, errors
from zbcompile.passes.capture.export import ExportOptions, export_forward, export_training_step
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.compile_step import compile_graph
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.vocabulary.log_probs import log_probs
from zbcompile.passes.vocabulary.output_layer import NotShardableError
from zbcompile.passes.vocabulary.shard import shard_passes
from zbcompile.passes.vocabulary.shard_program import even_bounds
from zbcompile.passes.vocabulary.trunk import cut_output_layer

WORDS, WIDTH = 13, 8
Loss = Callable[..., Any]


class Model(nn.Module):
    """An embedding, two layers and an output layer in one of several forms."""

    def __init__(self, form: str = "plain", words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.words = form, words
        self.embedding = nn.Embedding(words, WIDTH, padding_idx=2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.output = nn.Linear(WIDTH, words, bias=form in ("bias", "autocast", "two heads"))
        if form in ("tied", "tied twice", "tied matmul"):
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        if self.form == "tied twice":
            hidden = hidden * self.embedding(tokens.flip(1))
        if self.form == "tied matmul":
            return hidden @ self.embedding.weight.T
        if self.form == "router":
            return self.output(hidden), hidden.square().mean()
        if self.form == "two heads":  # F.linear adds the bias to the second product
            return [self.output(hidden), self.output(hidden.sin()[:, :-1])]
        if self.form == "chunks":
            return [self.output(chunk) for chunk in hidden.unbind(0)]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.form == "autocast"):
            logits = self.output(hidden)
        if self.form == "soft cap":
            return torch.tanh(logits / 3.0) * 3.0
        return logits / 4.0 if self.form == "scaled" else logits


def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), **options)


def summed(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target, reduction="sum") * 0.1


def unreduced(logits: Tensor, target: Tensor) -> Tensor:
    losses = cross_entropy(logits, target, reduction="none")
    return losses.square().sum() / (target.flatten() != 3).sum()


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def last_row(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, -1], target[:, -1])


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target, label_smoothing=0.1)


def z_loss(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + 1e-2 * logits.logsumexp(-1).square().mean()


def z_loss_of_all_rows(logits: Tensor, target: Tensor) -> Tensor:
    return shifted(logits, target) + 1e-2 * logits.logsumexp(-1, keepdim=True).square().mean()


def nll(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), target.flatten())


def gathered(logits: Tensor, target: Tensor) -> Tensor:
    saved = target >= 0
    labels = target.clamp(min=0)[..., None]
    return -(F.log_softmax(logits, -1).gather(-1, labels).squeeze(-1) * saved).sum() / 7


def without_softmax(logits: Tensor, target: Tensor) -> Tensor:
    labels = target.clamp(min=0)[..., None]
    return (logits.logsumexp(-1) - logits.gather(-1, labels).squeeze(-1)).mean()


def focal(logits: Tensor, target: Tensor) -> Tensor:
    chosen = F.log_softmax(logits, -1).gather(-1, target.clamp(min=0)[..., None]).squeeze(-1)
    return -((1 - chosen.exp()).square() * chosen).mean()


def with_dropout(logits: Tensor, target: Tensor) -> Tensor:
    return F.dropout(cross_entropy(logits, target, reduction="none"), 0.5).mean()


def partly_without_gradients(logits: Tensor, target: Tensor) -> Tensor:
    chosen = F.log_softmax(logits, -1).gather(-1, target.clamp(min=0)[..., None]).squeeze(-1)
    with torch.no_grad():
        weight = (1 - chosen.exp()).square()
    return -(weight * chosen).mean()


def hooked(logits: Tensor, target: Tensor) -> Tensor:
    loss = cross_entropy(logits, target)
    loss.register_hook(lambda gradient: gradient * 2)
    return loss * 0.5


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2.0


def by_a_function(logits: Tensor, target: Tensor) -> Any:
    return Doubled.apply(cross_entropy(logits, target))


def with_router(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    logits, further = output
    return (cross_entropy(logits, target) + 0.3 * further) * 0.5


def of_chunks(chunks: list[Tensor], target: Tensor) -> Tensor:
    losses = [F.cross_entropy(*pair) for pair in zip(chunks, target.unbind(0), strict=True)]
    return torch.stack(losses).mean()


def of_two_heads(heads: list[Tensor], target: Tensor) -> Tensor:
    first, further = heads
    return cross_entropy(first, target) + 0.3 * smoothed(further, target[:, 1:])


def batch_of(words: int = WORDS) -> Batch:
    tokens, target = torch.randint(words, (2, 5)), torch.randint(words, (2, 5))
    target[0, 2] = -100
    return (tokens,), {}, target


def run_sharded(
    model: nn.Module, loss: Loss, batches: list[Batch], ranks: int, barriers: int, **options: Any
) -> StepResult:
    step = export_training_step(model, *batches[0], loss)
    return run_step(step, model, batches, ranks, barriers, **options).run()


def run_step(
    step: StepGraph,
    model: nn.Module,
    batches: list[Batch],
    ranks: int,
    barriers: int,
    **options: Any,
) -> ShardedRunner:
    sharded = cut_output_layer(step)
    compiled = compile_graph(sharded.trunk, **{"ranks_of": (0, 1), **options})
    bounds = even_bounds(sharded.loss.words, ranks)
    sum_dtype = CompileOptions(accumulate_dtype=torch.float32).dtype_of_sum
    program = shard_passes(sharded, bounds, barriers, sum_dtype)
    return ShardedRunner(sharded, compiled, program, model, batches)


def check(model: nn.Module, loss: Loss, shards: Sequence[tuple[int, int]], **options: Any) -> None:
    torch.manual_seed(1)
    batches = [batch_of(getattr(model, "words", WORDS)) for _ in range(2)]
    check_batches(model, loss, batches, shards, **options)


def check_batches(
    model: nn.Module,
    loss: Loss,
    batches: list[Batch],
    shards: Sequence[tuple[int, int]],
    **options: Any,
) -> None:
    """Compares steps with some numbers of ranks and barriers with eager mode."""
    step = export_training_step(model, *batches[0], loss)
    expected = eager_step(model, batches, loss, seed=0)
    for ranks, barriers in shards:
        result = run_step(step, model, batches, ranks, barriers, **options).run()
        wrong = errors(result, expected)
        assert max(wrong.values()) <= 1e-6, (ranks, barriers, wrong)


LOSSES = [
    *(cross_entropy, summed, unreduced, shifted, last_row, smoothed, z_loss, z_loss_of_all_rows),
    *(nll, gathered, without_softmax, focal),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss: Loss) -> None:
    check(Model(), loss, [(2, 1), (2, 2)])


@pytest.mark.parametrize(
    ("form", "loss"),
    [
        ("bias", cross_entropy),
        ("tied", cross_entropy),
        ("tied twice", cross_entropy),
        ("tied matmul", cross_entropy),
        ("scaled", smoothed),
        ("soft cap", z_loss),
        ("soft cap", smoothed),
        ("router", with_router),
        ("chunks", of_chunks),
        ("two heads", of_two_heads),
    ],
)
def test_forms_of_the_layer(form: str, loss: Loss) -> None:
    check(Model(form), loss, [(3, 1), (2, 2)])


def test_more_ranks_than_words() -> None:
    check(Model("bias", words=3), smoothed, [(5, 1), (5, 2)])


@pytest.mark.parametrize(
    "options",
    [
        {"ranks_of": (0, 1, 2, 3)},
        {"ranks_of": (0, 1, 1, 0)},
        {"ranks_of": (0, 1), "recompute": "full"},
    ],
    ids=str,
)
def test_stages_of_the_trunk(options: dict[str, Any]) -> None:
    check(Model("tied twice"), cross_entropy, [(2, 1)], **options)


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "use_cache": False}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
OF_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "use_cache": False}
# Llama, GPT-2, Gemma 2 and BERT are in engine/test_vocabulary_models.py.
MODELS: dict[str, dict[str, Any]] = {
    "t5": {**OF_T5, "dropout_rate": 0.0, "decoder_start_token_id": 0},  # two lookups
    "qwen3": {**SIZES, **ATTENTION, "head_dim": 8},
    "mixtral": {**SIZES, **ATTENTION, **EXPERTS, "router_aux_loss_coef": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str) -> None:
    transformers, words = pytest.importorskip("transformers"), 67
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, vocab_size=words, **MODELS[name])
    kind = "AutoModelForSeq2SeqLM" if name == "t5" else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_config(config).train()
    tokens, labels = torch.randint(3, words, (2, 2, 8)).unbind()
    labels[0, :3] = -100
    batch: Batch = (), {"input_ids": tokens, "labels": labels}, None
    check_batches(model, lambda output, _: output.loss, [batch, batch], [(2, 1), (3, 2), (4, 1)])


@pytest.mark.parametrize("form", ["plain", "soft cap", "autocast"])
@pytest.mark.parametrize("barriers", [1, 2])
def test_half_precision_is_no_worse_than_unsplit(form: str, barriers: int) -> None:
    model = Model(form) if form == "autocast" else Model(form).bfloat16()
    exact = copy.deepcopy(model).double()
    exact.form = "bias" if form == "autocast" else form
    batches = [batch_of()]
    reference = eager_step(exact, batches, cross_entropy, seed=0)
    own = errors(eager_step(model, batches, cross_entropy, seed=0), reference)
    wrong = errors(run_sharded(model, cross_entropy, batches, 3, barriers), reference)
    worse = {
        name: (error, own[name]) for name, error in wrong.items() if error > 1.1 * own[name] + 3e-3
    }
    assert not worse


@pytest.mark.parametrize("barriers", [1, 2])
def test_a_batch_without_labels(barriers: int) -> None:
    """torch: a loss of NaN, gradients of exactly 0."""
    tokens, _, target = batch_of()
    batches = [(tokens, {}, torch.full_like(target, -100))]
    result = run_sharded(Model(), cross_entropy, batches, 3, barriers)
    assert result.losses[0].isnan()
    assert not any(value.any() for value in result.gradients.values())


def test_a_label_that_is_no_word() -> None:
    """Eager mode raises an error; shards cannot, and must not return a number."""
    _, _, target = batch_of()
    target[1, 1] = WORDS
    batches: list[Batch] = [batch_of()]
    runner = run_step(
        export_training_step(Model(), *batches[0], cross_entropy), Model(), batches, 2, 1
    )
    for runs in runner.shards:
        runs[0].inputs[0]["target"] = target
    assert runner.run().losses[0].isnan()


@pytest.mark.parametrize("barriers", [1, 2])
def test_a_shard_of_masked_words(barriers: int) -> None:
    model = Model("bias")
    with torch.no_grad():
        model.output.bias[-4:] = -torch.inf
    tokens, _, target = batch_of()
    batches = [(tokens, {}, target.clamp(max=8))]
    result = run_sharded(model, cross_entropy, batches, 4, barriers)
    wrong = errors(result, eager_step(model, batches, cross_entropy, seed=0))
    assert max(wrong.values()) <= 1e-6, wrong


def test_large_logits_keep_their_digits() -> None:
    model = Model()
    with torch.no_grad():
        model.output.weight *= 1e3
    check(model, cross_entropy, [(3, 1)])


@pytest.mark.parametrize("barriers", [1, 2])
def test_bytes_between_s_and_t(barriers: int) -> None:
    """The hidden state, the logits of the shard's words and three numbers per row."""
    batches = [batch_of()]
    model = Model()
    step = export_training_step(model, *batches[0], cross_entropy)
    runner = run_step(step, model, batches, 3, barriers)
    runner.run()
    rows, words = 10, (5, 5, 3)
    assert runner.waiting_bytes == [4 * rows * (WIDTH + count + 3) for count in words]
    counted = [runner.program.state_bytes(rank) for rank in range(3)]
    assert [count - 2 * 4 * rows for count in counted] == runner.waiting_bytes


@pytest.mark.parametrize(("barriers", "products"), [(1, (2, 1)), (2, (1, 2))])
def test_products_of_s_and_t(barriers: int, products: tuple[int, int]) -> None:
    step = export_training_step(Model(), *batch_of(), cross_entropy)
    sharded = cut_output_layer(step)
    program = shard_passes(sharded, ((0, 6), (6, 6), (6, WORDS)), barriers)
    one = 2 * 10 * WIDTH * 6
    assert (program.flops[0]["S"], program.flops[0]["T"]) == (products[0] * one, products[1] * one)
    assert program.flops[1]["S"] == program.flops[1]["T"] == 0


def test_the_step_stays_as_it_is() -> None:
    step = export_training_step(Model(), *batch_of(), cross_entropy)
    before = str(step.graph)
    first = cut_output_layer(step)
    shard_passes(first, even_bounds(WORDS, 2), 1)
    compile_graph(first.trunk, ranks_of=(0, 1))
    assert str(step.graph) == before
    shard_passes(first, even_bounds(WORDS, 2), 2)


def test_the_trunk_has_no_sharded_parameters() -> None:
    sharded = cut_output_layer(export_training_step(Model("bias"), *batch_of(), cross_entropy))
    names = {"embedding.weight", "output.weight", "output.bias"}
    assert not names & (sharded.trunk.parameters.keys() | sharded.trunk.gradients.keys())
    assert set(shard_passes(sharded, even_bounds(WORDS, 2), 1).parameters) == names


def test_log_probabilities_of_labels() -> None:
    model = Model("soft cap")
    tokens, _, target = batch_of()
    step = export_forward(model, tokens, {}, target, log_probs)
    sharded = cut_output_layer(step, rows={"output.weight"})
    assert sharded.lookups is None
    compiled = compile_graph(sharded.trunk, ranks_of=(0, 1), recompute="off")
    program = shard_passes(sharded, even_bounds(WORDS, 3), barriers=0)
    assert [set(pieces) for pieces in program.pieces] == [{"S", "STATS"}] * 3
    runner = ShardedRunner(sharded, compiled, program, model, [(tokens, {}, target)])
    actual, words = runner.forward()
    expected, _ = log_probs(model(*tokens), target)
    assert words == WORDS
    assert torch.allclose(actual, expected, atol=1e-6)


class Custom(nn.Module):
    """An output layer by a function of the user, with layers before it."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.wide = nn.Parameter(torch.randn(WORDS + 3, WIDTH))
        self.bias = nn.Parameter(torch.randn(WORDS))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.function(self, hidden)


def einsum(model: Any, hidden: Tensor) -> Tensor:
    return torch.bmm(hidden, model.weight.T.expand(2, WIDTH, WORDS))


def columns(model: Any, hidden: Tensor) -> Tensor:
    return F.linear(hidden, model.wide)[..., :WORDS]


def plain(model: Any, hidden: Tensor) -> Tensor:
    return F.linear(hidden, model.weight)


def of_the_weight_too(model: Any, hidden: Tensor) -> Tensor:
    return F.linear(hidden + model.weight.mean(0), model.weight)


def with_and_without_bias(model: Any, hidden: Tensor) -> Any:
    logits = hidden @ model.weight.T
    return logits, logits + model.bias


def of_a_constant(model: Any, hidden: Tensor) -> Tensor:
    return F.linear(hidden.detach(), model.weight)


def second_dimension(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), target)


def of_both(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return cross_entropy(output[0], target) + cross_entropy(output[1], target)


def two_labels(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + cross_entropy(logits, target.flip(0))


def two_forms(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits / 2.0, target) + logits.logsumexp(-1).mean()


def class_weights(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target, weight=torch.ones(WORDS))


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    return (F.log_softmax(logits, -1) * F.softmax(logits, -1)).sum()


def shifted_words(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits + torch.zeros(WORDS), target)


def repeated(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(torch.cat([logits, logits], 1), torch.cat([target, target], 1)) + nll(
        logits, target
    )


def total(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + logits.sum()


def masked(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits.masked_fill(torch.arange(WORDS) < 2, -1e9), target)


@pytest.mark.parametrize(
    ("function", "loss", "reason"),
    [
        (columns, cross_entropy, "slice of the logits"),
        (plain, second_dimension, "transpose of the logits"),
        (plain, masked, "masked_fill of the logits"),
        (plain, two_labels, "terms of the loss with different labels"),
        (plain, two_forms, "reads logits before and after a bias, scale, cap or cast"),
        (of_the_weight_too, cross_entropy, "another use of weight in the model"),
        (
            with_and_without_bias,
            of_both,
            "reads logits before and after a bias, scale, cap or cast",
        ),
        (of_a_constant, cross_entropy, "an output layer before which nothing is trained"),
        (plain, repeated, "cat of the logits"),
        (plain, total, "sum of the logits"),
        (plain, class_weights, "nll_loss_forward of the logits"),
        (plain, entropy, "mul of the logits|_softmax of the logits"),
        (plain, shifted_words, "add of the logits"),
        (plain, with_dropout, "a loss that draws random numbers"),
        (plain, partly_without_gradients, "a hook, an autograd.Function, or parts without"),
        (plain, hooked, "a hook, an autograd.Function, or parts without"),
        (plain, by_a_function, "a hook, an autograd.Function, or parts without"),
    ],
)
def test_what_is_not_sharded_is_named_with_its_line(
    function: Callable[..., Tensor], loss: Loss, reason: str
) -> None:
    step = export_training_step(Custom(function), *batch_of(), loss)
    with pytest.raises(NotShardableError, match=rf"({reason}).* \(\S*{__name__[-16:]}\.py:\d+\)"):
        cut_output_layer(step)


@pytest.mark.parametrize(
    ("model", "loss"), [(Model(), lambda x, _: x.square().mean()), (Custom(einsum), cross_entropy)]
)
def test_a_softmax_of_no_product_is_not_sharded(model: nn.Module, loss: Loss) -> None:
    step = export_training_step(model, *batch_of(), loss)
    with pytest.raises(NotShardableError, match="no softmax normalizes the product"):
        cut_output_layer(step)


def test_a_softmax_of_a_router_is_none_of_words() -> None:
    class Routed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 4)

        def forward(self, tokens: Tensor) -> Any:
            weights = F.softmax(self.router(self.embedding(tokens)), -1).topk(2).values
            return super().forward(tokens) * weights.sum()

    step = export_training_step(Routed(), *batch_of(), lambda x, y: cross_entropy(x, y))
    with pytest.raises(NotShardableError, match="mul of the logits"):
        cut_output_layer(step)


@pytest.mark.parametrize("returns", ["", "metrics", "outputs"])
def test_metrics_count_if_they_are_returned(returns: Literal["", "metrics", "outputs"]) -> None:
    def loss(logits: Tensor, target: Tensor) -> Any:
        return cross_entropy(logits, target), (logits.argmax(-1) == target).float().mean()

    step = export_training_step(Model(), *batch_of(), loss, ExportOptions(returns=returns))
    if not returns:
        assert cut_output_layer(step).weight == "output.weight"
        return
    with pytest.raises(NotShardableError, match="results besides the loss"):
        cut_output_layer(step)


def test_a_loss_that_multiplies_the_losses_is_not_sharded() -> None:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return cross_entropy(output[0], target) * output[1]

    step = export_training_step(Model("router"), *batch_of(), loss)
    with pytest.raises(NotShardableError, match=r"a loss that also reads \w+, which depends on"):
        cut_output_layer(step)


def test_a_frozen_output_layer_is_not_sharded() -> None:
    model = Model()
    model.output.requires_grad_(False)
    step = export_training_step(model, *batch_of(), cross_entropy)
    with pytest.raises(NotShardableError, match=r"not trained \(output.weight\) .* vocab=.off"):
        cut_output_layer(step)


def test_an_embedding_that_counts_by_frequency_stays_whole() -> None:
    model = Model()
    model.embedding.scale_grad_by_freq = True
    sharded = cut_output_layer(export_training_step(model, *batch_of(), cross_entropy))
    assert sharded.lookups is None
    assert "embedding.weight" in sharded.trunk.gradients
    model.output.weight = model.embedding.weight
    step = export_training_step(model, *batch_of(), cross_entropy)
    with pytest.raises(NotShardableError, match="an embedding, tied to the output layer"):
        cut_output_layer(step)


def test_a_forward_that_returns_logits_is_not_sharded() -> None:
    tokens, _, _ = batch_of()
    step = export_forward(Model(), tokens, {}, None, lambda logits, _: logits.log_softmax(-1))
    with pytest.raises(NotShardableError, match="an output of the size of the vocabulary"):
        cut_output_layer(step)
