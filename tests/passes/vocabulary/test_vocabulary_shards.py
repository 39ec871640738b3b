"""A step whose output layer is sharded computes the loss and the gradients of eager mode."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.pass_graph_runner import Batch, StepResult, eager_step
from tests.support.vocabulary_training import distance
from zbcompile.passes.capture.export import ExportOptions, export_forward, export_training_step
from zbcompile.passes.vocabulary.output_layer import NotShardableError
from zbcompile.passes.vocabulary.shard import shard_passes
from zbcompile.passes.vocabulary.trunk import ShardedStep, cut_output_layer

WORDS, WIDTH = 13, 8
Output = Callable[["Model", Tensor], Any]


def plain(model: "Model", hidden: Tensor) -> Any:
    return model.output(hidden)


class Model(nn.Module):
    """An embedding, a layer, and a function that makes the output of them."""

    def __init__(self, function: Output = plain, words: int = WORDS, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.words = function, words
        self.embedding = nn.Embedding(words, WIDTH, padding_idx=2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(1))
        self.output = nn.Linear(WIDTH, words + options.get("more", 0), options.get("bias", False))
        if options.get("tied"):
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        self.tokens, hidden = tokens, self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.function(self, hidden)


def looked_up_twice(model: Model, hidden: Tensor) -> Any:
    return model.output(hidden * model.embedding(model.tokens.flip(1)))


def soft_cap(model: Model, hidden: Tensor) -> Any:
    return torch.tanh(model.output(hidden) / 3.0) * 3.0


def with_router(model: Model, hidden: Tensor) -> Any:
    return model.output(hidden), hidden.square().mean()


def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), **options)


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target, label_smoothing=0.1)


def z_loss(logits: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())
    return loss + 1e-2 * logits.logsumexp(-1, keepdim=True).square().mean()


def gathered(logits: Tensor, target: Tensor) -> Tensor:
    labels = target.clamp(min=0)[..., None]
    return F.log_softmax(logits, -1).gather(-1, labels).squeeze(-1)


def focal(logits: Tensor, target: Tensor) -> Tensor:
    chosen = gathered(logits, target)
    return -((1 - chosen.exp()).square() * chosen).mean()


def of_chunks(chunks: list[Tensor], target: Tensor) -> Tensor:
    losses = [F.cross_entropy(*pair) for pair in zip(chunks, target.unbind(0), strict=True)]
    return torch.stack(losses).mean()


def batch_of(words: int = WORDS) -> Batch:
    tokens, target = torch.randint(words, (2, 5)), torch.randint(words, (2, 5))
    target[0, 2] = -100
    return (tokens,), {}, target


def trained(
    model: nn.Module, loss: Any, batches: list[Batch], vocab: int, ranks: int = 2
) -> tuple[zbcompile.Pipeline, Tensor]:
    """A pipeline whose copy of `model` has trained one step, and the loss."""
    options = {"schedule": "1f1b", "ranks": ranks, "microbatches": len(batches), "vocab": vocab}
    pipe = zbcompile.pipeline(copy.deepcopy(model), loss=loss, **options)
    pipe.record = True
    return pipe, pipe.step(microbatches=batches)


def errors(pipe: zbcompile.Pipeline, loss: Tensor, expected: StepResult) -> dict[str, float]:
    """The differences of the loss and the gradients, relative to the largest entry."""
    results = {"loss": distance(loss, torch.stack(expected.losses).mean())}
    gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        results[name] = distance(gradient.double(), expected.gradients[name].double())
    return results


def check(model: Model, loss: Any, vocab: int, ranks: int = 2) -> None:
    """Compares a step with eager mode."""
    torch.manual_seed(1)
    batches = [batch_of(model.words) for _ in range(2)]
    ours = trained(model, loss, batches, vocab, ranks)
    wrong = errors(*ours, eager_step(model, batches, loss, seed=0))
    assert max(wrong.values()) <= 1e-6, wrong


FORMS: dict[str, tuple[Model, Any]] = {
    "z-loss": (Model(), z_loss),
    "sum": (Model(bias=True), lambda x, y: cross_entropy(x, y, reduction="sum") * 0.1),
    "last row": (
        Model(lambda model, hidden: hidden @ model.embedding.weight.T, tied=True),
        lambda logits, target: F.cross_entropy(logits[:, -1], target[:, -1]),
    ),
    "tied twice": (Model(looked_up_twice, tied=True), cross_entropy),
    "soft cap": (Model(soft_cap), focal),
    "chunks": (Model(lambda m, hidden: [m.output(chunk) for chunk in hidden.unbind(0)]), of_chunks),
    "more ranks than words": (Model(words=3, bias=True), smoothed),
}


@pytest.mark.mostly_slow(every=6)
@pytest.mark.parametrize("name", FORMS)
def test_forms_of_the_layer_and_of_the_loss(name: str) -> None:
    model, loss = FORMS[name]
    check(model, loss, 1 + len(name) % 2, ranks=4 if model.words == 3 else 2)


def test_labels_that_are_none_or_no_words() -> None:
    """Without labels torch has a loss of NaN and gradients of exactly 0. For a label that is no
    word it raises an error; shards cannot, and must not return a number."""
    tokens, _, target = batch_of()
    pipe, loss = trained(Model(), cross_entropy, [(tokens, {}, torch.full_like(target, -100))], 2)
    assert loss.isnan()
    assert not any(p.grad is None or p.grad.any() for p in pipe.parameters())
    target[1, 1] = WORDS
    assert pipe.step(*tokens, target=target).isnan()


def test_a_shard_of_masked_words_and_large_logits() -> None:
    model = Model(bias=True)
    with torch.no_grad():
        model.output.weight *= 1e3
        model.output.bias[-4:] = -torch.inf
    check(model, lambda logits, target: cross_entropy(logits, target.clamp(max=8)), 1, ranks=3)


def cut(model: nn.Module, loss: Any = cross_entropy, **options: Any) -> ShardedStep:
    step = export_training_step(model, *batch_of(), loss, ExportOptions(**options))
    return cut_output_layer(step)


def test_products_of_s_and_t() -> None:
    """With one barrier S makes the product of the hidden gradient as well, with two T does."""
    sharded = cut(Model())
    names = {"embedding.weight", "output.weight"}
    assert not names & (sharded.trunk.parameters.keys() | sharded.trunk.gradients.keys())
    one = 2 * 10 * WIDTH * 6
    for barriers, products in ((1, (2, 1)), (2, (1, 2))):
        shards = shard_passes(sharded, ((0, 6), (6, 6), (6, WORDS)), barriers)
        assert set(shards.parameters) == names
        flops = [(each["S"], each["T"]) for each in shards.flops]
        assert flops[:2] == [(products[0] * one, products[1] * one), (0, 0)]


def columns(model: Model, hidden: Tensor) -> Tensor:
    return model.output(hidden)[..., :WORDS]


def routed(model: Model, hidden: Tensor) -> Tensor:
    """A softmax of a router is none of words."""
    weights = F.softmax(model.layers[0](hidden), -1).topk(2).values
    return model.output(hidden) * weights.sum()


def einsum(model: Model, hidden: Tensor) -> Tensor:
    return torch.bmm(hidden, model.output.weight.T.expand(2, WIDTH, WORDS))


def times_router(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(output[0], target) * output[1]


def log_probs() -> Any:
    return export_forward(Model(), batch_of()[0], {}, None, lambda x, _: x.log_softmax(-1))


def frozen() -> Model:
    model = Model()
    model.output.requires_grad_(False)
    return model


def by_frequency() -> Model:
    model = Model(tied=True)
    model.embedding.scale_grad_by_freq = True
    return model


def hooked(logits: Tensor, target: Tensor) -> Tensor:
    loss = cross_entropy(logits, target)
    loss.register_hook(lambda gradient: gradient * 2)
    return loss * 0.5


def entropy(logits: Tensor, target: Tensor) -> Tensor:
    return (F.log_softmax(logits, -1) * F.softmax(logits, -1)).sum()


def dropped(logits: Tensor, target: Tensor) -> Tensor:
    return F.dropout(cross_entropy(logits, target, reduction="none"), 0.5).mean()


def two_labels(logits: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(logits, target) + cross_entropy(logits, target.flip(0))


# of the model, of the loss, the reason, which is followed by the line of the user
REFUSED: tuple[tuple[Model, Any, str], ...] = (
    (Model(columns, more=3), cross_entropy, "slice of the logits"),
    (Model(), lambda x, y: F.cross_entropy(x.transpose(1, 2), y), "transpose of the logits"),
    (Model(), two_labels, "terms of the loss with different labels"),
    (
        Model(),
        lambda x, y: cross_entropy(x / 2.0, y) + x.logsumexp(-1).mean(),
        "before and after a",
    ),
    (
        Model(lambda m, x: m.output(x + m.output.weight.mean(0))),
        cross_entropy,
        "another use of outp",
    ),
    (Model(lambda m, x: m.output(x.detach())), cross_entropy, "before which nothing is trained"),
    (Model(), lambda x, y: cross_entropy(x, y) + x.sum(), "sum of the logits"),
    (Model(), entropy, "mul of the logits|_softmax of the logits"),
    (Model(), dropped, "a loss that draws random numbers"),
    (Model(), hooked, "a hook, an autograd.Function"),
    (Model(routed), cross_entropy, "mul of the logits"),
)


@pytest.mark.parametrize(("model", "loss", "reason"), REFUSED)
def test_what_is_not_sharded_is_named_with_its_line(model: Model, loss: Any, reason: str) -> None:
    with pytest.raises(NotShardableError, match=rf"({reason}).* \(\S*shards\.py:\d+\)"):
        cut(model, loss)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: cut(Model(), lambda x, _: x.square().mean()), "no softmax normalizes the product"),
        (lambda: cut(Model(einsum)), "no softmax normalizes the product"),
        (
            lambda: cut(Model(with_router), times_router),
            r"a loss that also reads \w+, which depends",
        ),
        (lambda: cut(frozen()), r"not trained \(output.weight\) .* vocab=.off"),
        (lambda: cut(by_frequency()), "an embedding, tied to the output layer"),
        (lambda: cut_output_layer(log_probs()), "an output of the size of the vocabulary"),
    ],
)
def test_what_is_not_sharded(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(NotShardableError, match=reason):
        make()


def test_metrics_count_if_they_are_returned() -> None:
    def loss(logits: Tensor, target: Tensor) -> Any:
        return cross_entropy(logits, target), (logits.argmax(-1) == target).float().mean()

    assert cut(Model(), loss).weight == "output.weight"
    with pytest.raises(NotShardableError, match="results besides the loss"):
        cut(Model(), loss, returns="metrics")
