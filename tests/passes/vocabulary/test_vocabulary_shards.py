"""A step whose output layer is sharded computes the loss and the gradients of eager mode."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.pass_graph_runner import Batch, StepResult, eager_step
from tests.support.vocabulary_training import distance
from zbcompile.passes.capture.export import ExportOptions, export_forward, export_training_step
from zbcompile.passes.compile_step import compile_graph
from zbcompile.passes.vocabulary.output_layer import NotShardableError
from zbcompile.passes.vocabulary.shard import shard_passes
from zbcompile.passes.vocabulary.shard_program import even_bounds
from zbcompile.passes.vocabulary.trunk import cut_output_layer
from zbcompile.prediction.predict import predicted_costs
from zbcompile.schedules import simulate

WORDS, WIDTH = 13, 8
Loss = Callable[..., Any]


class Model(nn.Module):
    """An embedding, two layers and an output layer in one of several forms."""

    def __init__(self, form: str = "plain", words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.words = form, words
        self.embedding = nn.Embedding(words, WIDTH, padding_idx=2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
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


def trained(
    model: nn.Module, loss: Loss | None, batches: list[Batch], vocab: int, **options: Any
) -> tuple[zbcompile.Pipeline, Tensor]:
    """Returns a pipeline whose copy of `model` has trained one step, and the loss."""
    options = {"schedule": "1f1b", "ranks": 2, **options}
    pipe = zbcompile.pipeline(
        copy.deepcopy(model), loss=loss, microbatches=len(batches), vocab=vocab, **options
    )
    pipe.record = True
    return pipe, pipe.step(microbatches=batches)


def errors(pipe: zbcompile.Pipeline, loss: Tensor, expected: StepResult) -> dict[str, float]:
    """Returns the differences of the loss and the gradients, relative to the largest entry."""
    results = {"loss": distance(loss, torch.stack(expected.losses).mean())}
    gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.gradients.keys()
    return results | {
        name: distance(gradient.double(), expected.gradients[name].double())
        for name, gradient in gradients.items()
    }


def check(
    model: nn.Module,
    loss: Loss | None,
    vocab: int,
    batches: list[Batch] | None = None,
    **options: Any,
) -> None:
    """Compares a step with eager mode."""
    torch.manual_seed(1)
    batches = batches or [batch_of(getattr(model, "words", WORDS)) for _ in range(2)]
    ours = trained(model, loss, batches, vocab, **options)
    wrong = errors(*ours, eager_step(model, batches, loss, seed=0))
    assert max(wrong.values()) <= 1e-6, wrong


@pytest.mark.mostly_slow(every=14, suite=1)
@pytest.mark.parametrize(
    ("form", "loss", "vocab"),
    [
        ("bias", summed, 1),
        ("bias", nll, 2),
        ("tied", unreduced, 2),
        ("tied twice", shifted, 1),
        ("tied matmul", last_row, 2),
        ("plain", z_loss_of_all_rows, 2),
        ("plain", gathered, 1),
        ("scaled", smoothed, 1),
        ("scaled", without_softmax, 2),
        ("soft cap", z_loss, 2),
        ("soft cap", focal, 1),
        ("router", with_router, 1),
        ("chunks", of_chunks, 2),
        ("two heads", of_two_heads, 2),
    ],
)
def test_forms_of_the_layer_and_of_the_loss(form: str, loss: Loss, vocab: int) -> None:
    check(Model(form), loss, vocab, ranks=4 - vocab)


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("vocab", [1, 2])
def test_more_ranks_than_words(vocab: int) -> None:
    check(Model("bias", words=3), smoothed, vocab, ranks=5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"schedule": "zb-v"}, {"recompute": "full"}], ids=str)
def test_stages_of_the_trunk(options: dict[str, Any]) -> None:
    check(Model("tied twice"), cross_entropy, 1, **options)


@pytest.mark.slow
def test_two_lookups() -> None:
    """T5: its encoder and its decoder read the embedding."""
    transformers, words = pytest.importorskip("transformers"), 67
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    options = {"use_cache": False, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=words, **sizes, **options)
    model = transformers.T5ForConditionalGeneration(config).train()
    tokens, labels = torch.randint(3, words, (2, 2, 8)).unbind()
    labels[0, :3] = -100
    batch: Batch = (), {"input_ids": tokens, "labels": labels}, None
    check(model, None, 1, [batch, batch], ranks=3)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "vocab"), [("soft cap", 1), ("autocast", 2)])
def test_half_precision_is_no_worse_than_unsplit(form: str, vocab: int) -> None:
    model = Model(form) if form == "autocast" else Model(form).bfloat16()
    exact = copy.deepcopy(model).double()
    exact.form = "bias" if form == "autocast" else form
    batches = [batch_of()]
    reference = eager_step(exact, batches, cross_entropy, seed=0)
    unsplit = eager_step(model, batches, cross_entropy, seed=0)
    ours = trained(model, cross_entropy, batches, vocab, ranks=3)
    for name, error in errors(*ours, reference).items():
        whole = unsplit.losses[0] if name == "loss" else unsplit.gradients[name]
        exactly = reference.losses[0] if name == "loss" else reference.gradients[name]
        assert error <= 1.1 * distance(whole.double(), exactly.double()) + 3e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 2])
def test_a_batch_without_labels(vocab: int) -> None:
    """torch: a loss of NaN, gradients of exactly 0."""
    tokens, _, target = batch_of()
    batch = tokens, {}, torch.full_like(target, -100)
    pipe, loss = trained(Model(), cross_entropy, [batch], vocab, ranks=3)
    assert loss.isnan()
    assert not any(p.grad is None or p.grad.any() for p in pipe.parameters())


def test_a_label_that_is_no_word() -> None:
    """Eager mode raises an error; shards cannot, and must not return a number."""
    tokens, _, target = batch_of()
    pipe, _ = trained(Model(), cross_entropy, [(tokens, {}, target)], 1)
    target[1, 1] = WORDS
    assert pipe.step(*tokens, target=target).isnan()


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 2])
def test_a_shard_of_masked_words(vocab: int) -> None:
    model = Model("bias")
    with torch.no_grad():
        model.output.bias[-4:] = -torch.inf
    tokens, _, target = batch_of()
    check(model, cross_entropy, vocab, [(tokens, {}, target.clamp(max=8))], ranks=4)


@pytest.mark.slow
def test_large_logits_keep_their_digits() -> None:
    model = Model()
    with torch.no_grad():
        model.output.weight *= 1e3
    check(model, cross_entropy, 1, ranks=3)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 2])
def test_bytes_between_s_and_t(vocab: int) -> None:
    """The hidden state, the logits of the shard's words and five numbers per row. The peak of a step
    is as predicted, but for one hidden state with a number per row."""
    pipe, _ = trained(Model(), cross_entropy, [batch_of()] * 3, vocab, ranks=3)
    program, (rows, words) = pipe.program, (10, (5, 5, 3))
    assert program.vocabulary is not None
    kept = [4 * rows * (WIDTH + count + 5) for count in words]
    assert [program.vocabulary.state_bytes(rank) for rank in range(3)] == kept
    predicted = simulate(program.schedule, predicted_costs(program)).peak_memory
    assert pipe.last_step is not None
    for rank, peak in enumerate(predicted):
        measured = pipe.last_step.peak_activation_bytes[rank]
        assert abs(measured - peak) <= 4 * rows * (WIDTH + 1)


@pytest.mark.slow
def test_products_of_s_and_t() -> None:
    """With one barrier S makes the product of the hidden gradient as well, with two T does."""
    sharded = cut_output_layer(export_training_step(Model(), *batch_of(), cross_entropy))
    one = 2 * 10 * WIDTH * 6
    for barriers, products in ((1, (2, 1)), (2, (1, 2))):
        flops = shard_passes(sharded, ((0, 6), (6, 6), (6, WORDS)), barriers).flops
        assert (flops[0]["S"], flops[0]["T"]) == (products[0] * one, products[1] * one)
        assert flops[1]["S"] == flops[1]["T"] == 0


@pytest.mark.slow
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


@pytest.mark.mostly_slow(every=6, suite=1)
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
