"""An output layer with its loss, whole in eager mode and in shards, so that the two can be compared."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbcompile.passes.capture.export import capture
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.pass_list.passes_in_order import canonicalise
from zbcompile.passes.vocabulary.output_layer import VocabularyHead, find_head
from zbcompile.passes.vocabulary.s_pass import scan
from zbcompile.passes.vocabulary.shard import Parameters, Shard
from zbcompile.passes.vocabulary.shard_program import even_bounds
from zbcompile.passes.vocabulary.t_pass import combine, update

WIDTH, WORDS, TILE = 8, 11, 3
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
    "class weights": lambda y, t: F.cross_entropy(rows(y), t.flatten(), weight=WEIGHTS[: y.shape[-1]].to(y.dtype)),
    "smoothing": lambda y, t: F.cross_entropy(rows(y), t.flatten(), label_smoothing=0.1),
    "smoothing and class weights": lambda y, t: F.cross_entropy(
        rows(y), t.flatten(), label_smoothing=0.1, weight=WEIGHTS[: y.shape[-1]].to(y.dtype)
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
    shards = [Shard(head, rank, bounds, barriers, not lean, TILE) for rank in range(p)]
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
        update(s, tokens.detach(), o, e.coefficients, (k.raw, k.maximum), values)
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
