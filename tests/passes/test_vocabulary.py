"""Vocabulary passes against the unsplit output layer in eager mode; what is recognised, what is refused."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbcompile.passes.canonical import canonicalise
from zbcompile.passes.capture import capture
from zbcompile.passes.slots import Slot
from zbcompile.passes.vocabulary_head import VocabularyHead, find_head
from zbcompile.passes.vocabulary_logits import NotShardable
from zbcompile.passes.vocabulary_program import even_bounds
from zbcompile.passes.vocabulary_shard import Parameters, Shard, combine, scan, update

WIDTH, WORDS = 8, 11
WEIGHTS = torch.linspace(0.5, 2.0, WORDS)
Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A body of one layer and an output layer."""

    def __init__(self, words: int = WORDS, bias: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def rows(y: Tensor) -> Tensor:
    return y.reshape(-1, y.shape[-1])


def shifted(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(rows(y[:, :-1]), t[:, 1:].reshape(-1))


def z_loss(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(rows(y), t.flatten()) + 1e-2 * torch.logsumexp(y, -1).square().mean()


def capped(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(rows(3 * torch.tanh(y / 3)), t.flatten(), label_smoothing=0.2)


def gathered(y: Tensor, t: Tensor) -> Tensor:
    log_p = F.log_softmax(y.float() if y.dtype == torch.bfloat16 else y, -1)
    return -(log_p.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (t >= 0)).sum() / 7


def focal(y: Tensor, t: Tensor) -> Tensor:
    log_p = F.log_softmax(y, -1).gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -((1 - log_p.exp()).square() * log_p).mean()


LOSSES: dict[str, Loss] = {
    "mean": lambda y, t: F.cross_entropy(rows(y), t.flatten()),
    "sum": lambda y, t: F.cross_entropy(rows(y), t.flatten(), reduction="sum") * 0.1,
    "none": lambda y, t: F.cross_entropy(rows(y), t.flatten(), reduction="none").square().mean(),
    "class dimension in the middle": lambda y, t: F.cross_entropy(y.transpose(1, 2), t),
    "another ignore_index": lambda y, t: F.cross_entropy(rows(y), t.flatten().clamp(min=0), ignore_index=0),
    "class weights": lambda y, t: F.cross_entropy(rows(y), t.flatten(), weight=WEIGHTS.to(y.dtype)),
    "smoothing": lambda y, t: F.cross_entropy(rows(y), t.flatten(), label_smoothing=0.1),
    "smoothing and class weights": lambda y, t: F.cross_entropy(
        rows(y), t.flatten(), label_smoothing=0.1, weight=WEIGHTS.to(y.dtype)
    ),
    "nll": lambda y, t: F.nll_loss(F.log_softmax(rows(y), -1), t.flatten()),
    "shifted": shifted,
    "z-loss": z_loss,
    "soft cap and smoothing": capped,
    "log_softmax and gather": gathered,
    "focal": focal,
    "scale": lambda y, t: F.cross_entropy(rows(y * 0.5), t.flatten()),
}


@dataclass(frozen=True)
class Made:
    """Loss and gradients."""

    loss: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def named(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if value is not None}


def problem(dtype: torch.dtype = torch.float64, words: int = WORDS) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, words, (2, 5))
    labels[0, 1] = labels[1, 4] = -100
    return Model(words).to(dtype), torch.randn(2, 5, WIDTH, dtype=dtype), labels


def head_of(model: nn.Module, x: Tensor, labels: Tensor, loss: Loss) -> tuple[VocabularyHead, dict[Slot, Tensor]]:
    canonical = canonicalise(capture(model, (x,), {}, labels, loss))
    head = find_head(canonical)
    constants = canonical.captured.constants
    return head, {slot: labels if slot.name == "target" else constants[slot.name] for slot in head.loss.data}


def hidden_of(model: Model, x: Tensor) -> Tensor:
    return torch.tanh(model.body(x)).detach()


def eager(model: Model, hidden: Tensor, labels: Tensor, loss: Loss) -> Made:
    hidden = hidden.clone().requires_grad_()
    value = loss(model.head(hidden), labels)
    parameters = [hidden, model.head.weight, *([] if model.head.bias is None else [model.head.bias])]
    gradients = torch.autograd.grad(value, parameters)
    return Made(value.detach(), gradients[0], gradients[1], gradients[2] if len(gradients) > 2 else None)


def sharded(
    head: VocabularyHead, values: dict[Slot, Tensor], model: Model, hidden: Tensor, p: int, barriers: int, lean: bool
) -> Made:
    """All shards, one after the other, with the collectives written out."""
    bounds = even_bounds(head.size, p)
    shards = [Shard(head, rank, bounds, barriers, not lean, 3 if lean else head.size) for rank in range(p)]
    bias = None if model.head.bias is None else model.head.bias.detach()
    own = [Parameters(model.head.weight.detach()[a:b], None if bias is None else bias[a:b]) for a, b in bounds]
    leaf = hidden.clone().requires_grad_()
    tokens = head.tokens(leaf)
    scanned = [scan(s, tokens.detach(), o, values) for s, o in zip(shards, own, strict=True)]
    statistics = torch.stack([each.statistics for each in scanned])
    ended = [
        combine(s, statistics, torch.ones((), dtype=hidden.dtype), _kept(k._asdict()), values)
        for s, k in zip(shards, scanned, strict=True)
    ]
    updates = [
        update(s, tokens.detach(), o, e.coefficients, k.raw, values)
        for s, o, e, k in zip(shards, own, ended, scanned, strict=True)
    ]
    parts = [each.part for each in (ended if barriers == 1 else updates)]
    (gradient,) = torch.autograd.grad(tokens, leaf, torch.stack(parts).sum(0).to(tokens.dtype))
    biases = None if bias is None else torch.cat([each.bias for each in updates])
    return Made(ended[0].loss, gradient, torch.cat([each.weight for each in updates]), biases)


def _kept(found: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if value is not None}


def far(ours: Made, theirs: Made, bound: float) -> dict[str, float]:
    """What differs by more than `bound` of the largest entry (absolutely where that is 0)."""
    found = {}
    for name, value in theirs.named().items():
        scale = value.abs().max().item() or 1.0
        distance = (ours.named()[name].double() - value.double()).abs().max().item() / scale
        if not distance <= bound:
            found[name] = distance
    return found


ALL = tuple(product(range(1, 9), (1, 2), (False, True)))
FEW = ((1, 1, False), (2, 1, False), (3, 2, False), (5, 1, True), (8, 2, True), (16, 1, False))


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_in_fp64(name: str) -> None:
    """One to eight shards, uneven and (with 16) empty ones; both algorithms, kept and lean."""
    model, x, labels = problem()
    head, values = head_of(model, x, labels, LOSSES[name])
    hidden = hidden_of(model, x)
    expected = eager(model, hidden, labels, LOSSES[name])
    for p, barriers, lean in ALL if name in ("mean", "soft cap and smoothing") else FEW:
        assert not far(sharded(head, values, model, hidden, p, barriers, lean), expected, 1e-12), (p, barriers, lean)


def adversarial(kind: str, hidden: Tensor, model: Model) -> Tensor:
    """Logits of 1e4, all equal, or one confident token."""
    with torch.no_grad():
        if kind == "1e4":
            model.head.weight *= 2e4
        elif kind == "all equal":
            model.head.weight.zero_()
            model.head.bias.fill_(3.0)
        elif kind == "confident":
            hidden[0, 0] = 40 * model.head.weight[5] / model.head.weight[5].square().sum()
    return hidden


@pytest.mark.parametrize("kind", ["random", "1e4", "all equal", "confident"])
@pytest.mark.parametrize("name", ["mean", "smoothing", "z-loss", "soft cap and smoothing"])
def test_fp32(name: str, kind: str) -> None:
    """Within 2e-6, or twice the unsplit fp32 model's own error against fp64 where that is larger."""
    double, x, labels = problem()
    labels[0, 0] = 5
    hidden = adversarial(kind, hidden_of(double, x), double)
    single = Model().float()
    single.load_state_dict(double.state_dict())
    exact = Model().double()
    exact.load_state_dict(single.state_dict())
    reference = eager(exact, hidden.float().double(), labels, LOSSES[name])
    own = eager(single, hidden.float(), labels, LOSSES[name])
    head, values = head_of(single, x.float(), labels, LOSSES[name])
    for p, barriers, lean in ((1, 1, False), (3, 1, False), (3, 2, True), (8, 1, True)):
        ours = sharded(head, values, single, hidden.float(), p, barriers, lean)
        for what, value in reference.named().items():
            scale = value.abs().max().item() or 1.0
            error = (ours.named()[what].double() - value).abs().max().item() / scale
            allowed = max(2e-6, 2 * (own.named()[what].double() - value).abs().max().item() / scale)
            assert error <= allowed, (what, p, barriers, lean)


@pytest.mark.parametrize("barriers", [1, 2])
def test_bf16_is_no_worse_than_the_unsplit_model(barriers: int) -> None:
    """Confident tokens included, whose input gradient is a difference of two nearly equal vectors."""
    double, x, labels = problem()
    labels[0, 0] = 5
    half = Model().bfloat16()
    half.load_state_dict(double.state_dict())
    exact = Model().double()
    exact.load_state_dict(half.state_dict())
    hidden = adversarial("confident", hidden_of(double, x), double).bfloat16()
    reference = eager(exact, hidden.double(), labels, LOSSES["mean"])
    own = eager(half, hidden, labels, LOSSES["mean"])
    head, values = head_of(half, x.bfloat16(), labels, LOSSES["mean"])
    ours = sharded(head, values, half, hidden, 3, barriers, False)
    for what, value in reference.named().items():
        error = (ours.named()[what].double() - value).abs().max()
        assert error <= 1.1 * (own.named()[what].double() - value).abs().max() + 1e-3 * value.abs().max(), what


def test_all_tokens_ignored() -> None:
    """torch: a loss of NaN, gradients of exactly 0."""
    model, x, labels = problem()
    labels = torch.full_like(labels, -100)
    head, values = head_of(model, x, labels, LOSSES["mean"])
    for barriers in (1, 2):
        ours = sharded(head, values, model, hidden_of(model, x), 3, barriers, False)
        assert ours.loss.isnan()
        assert not any(value.any() or value.isnan().any() for name, value in ours.named().items() if name != "loss")


def test_deterministic() -> None:
    model, x, labels = problem(torch.float32)
    head, values = head_of(model, x, labels, LOSSES["soft cap and smoothing"])
    one, other = (sharded(head, values, model, hidden_of(model, x), 5, 1, False).named() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


class Classifier(nn.Module):
    """An MLP as wide as the vocabulary in front of the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.narrow(F.gelu(self.wide(x))))


def test_an_mlp_as_wide_as_the_vocabulary_is_not_taken() -> None:
    head, _ = head_of(Classifier(), torch.randn(2, 5, WIDTH), torch.zeros(2, 5, dtype=torch.long), LOSSES["mean"])
    assert head.weight == "head.weight"
    assert str(head).startswith("head.weight [32, 8] + head.bias")


REFUSED: dict[str, tuple[Loss, str]] = {
    "no vocabulary": (lambda y, t: (y - 1).square().mean() + 0 * t.sum(), "all of them at once"),
    "entropy": (lambda y, t: (F.softmax(y, -1) * F.log_softmax(y, -1)).sum(), "all of them at once"),
    "two functions": (lambda y, t: shifted(torch.tanh(y), t) + z_loss(y, t), "before and after"),
    "different tokens": (lambda y, t: shifted(y, t) + torch.logsumexp(y, -1).mean(), "different tokens"),
    "different labels": (
        lambda y, t: F.cross_entropy(rows(y), t.flatten()) + F.cross_entropy(rows(y), 0 * t.flatten()),
        "different labels",
    ),
    "without labels": (lambda y, t: torch.logsumexp(y, -1).mean() + 0 * t.sum(), "no term of the loss has labels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_says_why(name: str) -> None:
    loss, reason = REFUSED[name]
    with pytest.raises(NotShardable, match=reason):
        head_of(Model(), torch.randn(2, 5, WIDTH), torch.zeros(2, 5, dtype=torch.long), loss)


class Auxiliary(Model):
    """Returns its own loss, with a term that is none of the logits'."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return F.cross_entropy(rows(self.head(hidden)), torch.zeros(10, dtype=torch.long)) + hidden.square().mean()


def test_an_auxiliary_loss_is_refused() -> None:
    canonical = canonicalise(capture(Auxiliary(), (torch.randn(2, 5, WIDTH),), {}))
    with pytest.raises(NotShardable, match="an auxiliary loss"):
        find_head(canonical)
