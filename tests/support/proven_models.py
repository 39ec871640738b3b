"""Correct models whose ranks exchange tensors along one dimension of a mesh, as cases of the proof."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import dtensor_models, expert_layers
from tests.support.faulty_models import FAULTS, VOCABULARY, LeaveTwice, case_of
from tests.support.oracle import Batch
from tests.support.parallel_models import LENGTH, WIDTH, Along, ContextParallel, Enter, Leave, TensorParallel
from tests.support.proofs import RANKS, Case, Made

BY_HAND = ("tp plain", "tp functions", "tp sequence", "cp gather", "cp ulysses", "cp ring")
DISTRIBUTED = ("plain", "sequence", "loss", "odd")
EXPERTS = ("padded", "counted")
OTHERS = (
    *("ep-padded", "ep-counted", "ep-dispatched", "ep-looked-up", "tp-words", "tp-residual"),
    *("dp-norm", "dp-contrast", "sharded-output"),
)


def by_hand(kind: str) -> Case:
    dimension, _, form = kind.partition(" ")
    norms = {"*norm*": {"tp": "partial"}} if form == "sequence" else {}

    def make(mesh: Any) -> Made:
        model = ContextParallel(mesh, form) if dimension == "cp" else TensorParallel(mesh, form)
        x, y = torch.randn(2, 2, LENGTH, WIDTH).unbind()
        return model, getattr(model, "loss", F.mse_loss), Batch((x,), {}, y)

    return Case(make, dimension, TensorParallel.PLACEMENTS | norms if dimension == "tp" else {})


def distributed(form: str, layers: int = 1) -> Case:
    def make(mesh: Any) -> Made:
        x, y = torch.randint(dtensor_models.VOCABULARY, (2, 2, dtensor_models.LENGTH)).unbind()
        model = dtensor_models.parallelised(mesh["tp"], form, layers)
        return model, dtensor_models.loss_of, Batch((x,), {}, y)

    return Case(make, "tp", {})


def experts(form: str) -> Case:
    """Mixtures that drop no token."""
    kind = expert_layers.CountingLayer if form == "counted" else expert_layers.Layer

    def make(mesh: Any) -> Made:
        group, rank = mesh.get_group("ep"), mesh["ep"].get_local_rank()
        model = expert_layers.mixture_of(rank, group, 4.0, kind=kind)
        x, y = torch.randn(2, 8, expert_layers.WIDTH).unbind()
        return model, F.mse_loss, Batch((x, expert_layers.bias_of("even", 0, len(x))), {}, y)

    return Case(make, "ep", expert_layers.SHARDED)


class Dispatched(nn.Module):
    """Experts on all ranks, each of which gets as many tokens of every rank."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along = Along(mesh, "ep")
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.expert = nn.Parameter(self.along.part(torch.randn(RANKS, WIDTH, WIDTH) / 4, 0).clone())

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        made = F.gelu(self.along.exchange(tokens) @ self.expert[0])
        return x + (self.along.exchange(made) * self.router(tokens).sigmoid()).view_as(x)


class NormedOverReplicas(nn.Module):
    """A norm by the statistics of the batches of all replicas."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along = Along(mesh, "dp")
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        centred = y - self.mean(y)
        return self.leave(F.gelu(centred * torch.rsqrt(self.mean(centred.square()) + 1e-5)))

    def mean(self, x: Tensor) -> Tensor:
        total: Tensor = LeaveTwice.apply(x.mean((0, 1)), self.along.group)
        return total / self.along.size


class Contrasted(nn.Module):
    """The loss of a replica holds its rows against those of all."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along = Along(mesh, "dp")
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.mean(1)
        scores = self.query(rows) @ self.along.gather(self.key(rows), 0).t()
        return F.cross_entropy(scores, torch.arange(len(rows)) + self.along.rank * len(rows))


class Words(nn.Module):
    """Tensor parallelism below an output layer that is whole on every rank of it."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.trunk = TensorParallel(mesh, "functions")
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def with_sharded_output() -> Case:
    def make(mesh: Any) -> Made:
        x, y = torch.randn(2, LENGTH, WIDTH), torch.randint(VOCABULARY, (2, LENGTH))
        return Words(mesh), of_words, Batch((x,), {}, y)

    return Case(make, "tp", TensorParallel.PLACEMENTS, vocab=True)


def of_words(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class SoftmaxOfWords(torch.autograd.Function):
    """Cross entropy of logits that are divided over the ranks, as Megatron writes it. Targets of other ranks are -1."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        shifted = logits - collectives.all_reduce(logits.max(-1).values, "max", group).unsqueeze(-1)
        shares = shifted.exp()
        total = collectives.all_reduce(shares.sum(-1), "sum", group)
        own = F.one_hot(target + 1, logits.shape[-1] + 1)[..., 1:]
        ctx.save_for_backward(shares / total.unsqueeze(-1) - own)
        return (total.log() - collectives.all_reduce((shifted * own).sum(-1), "sum", group)).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (own,) = ctx.saved_tensors
        return gradient * own / own[..., 0].numel(), None, None


class DividedWords(nn.Module):
    """A loss on divided logits, of what each rank's own columns have weighed by a softmax of their own."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along = Along(mesh, "tp")
        self.columns = nn.Parameter(self.along.part(torch.randn(WIDTH, WIDTH) / 4, 0).clone())
        self.head = nn.Parameter(self.along.part(torch.randn(VOCABULARY, WIDTH), 0).clone())

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(Enter.apply(x, self.along.processes), self.columns)
        shares = (scores - scores.amax(-1, keepdim=True)).exp()
        mixed = self.along.gather(shares / shares.sum(-1, keepdim=True), -1)
        logits = F.linear(mixed, self.head)
        target = torch.arange(x.shape[1]).expand(x.shape[:2]) - self.along.rank * logits.shape[-1]
        here = torch.where((target >= 0) & (target < logits.shape[-1]), target, -1)
        return SoftmaxOfWords.apply(logits, here, self.along.group)  # type: ignore[no-any-return]


class SummedWithResidual(nn.Module):
    """What all ranks have enters a sum of parts, with a factor that makes it count once."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along = Along(mesh, "tp")
        self.columns = nn.Parameter(self.along.part(torch.randn(WIDTH, WIDTH) / 4, 0).clone())
        self.rows = nn.Parameter(self.along.part(torch.randn(WIDTH, WIDTH) / 4, 1).clone())

    def forward(self, x: Tensor) -> Tensor:
        x = Enter.apply(x, self.along.processes)
        part = F.linear(F.gelu(F.linear(x, self.columns)), self.rows)
        return Leave.apply(part + (x / self.along.size), self.along.processes)  # type: ignore[no-any-return]


class LookedUp(nn.Module):
    """Rows of a table that is divided over the ranks: numbers travel to the ranks that have them, and rows back."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along = Along(mesh, "ep")
        self.table = nn.Parameter(self.along.part(torch.randn(2 * RANKS, WIDTH), 0).clone())
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum((0, 2)).argsort()
        numbers = collectives.all_to_all_single(order % 2, None, None, self.along.group)
        rows = self.along.exchange(self.table.index_select(0, numbers))
        return self.mix(x + torch.zeros_like(rows).index_copy(0, order, rows))


def plain(kind: Callable[[Any], nn.Module], dimension: str, placements: Any, loss: Any = F.mse_loss) -> Case:
    def make(mesh: Any) -> Made:
        x, y = torch.randn(2, 2, LENGTH, WIDTH).unbind()
        return kind(mesh), loss, Batch((x,), {}, y if loss is not None else None)

    return Case(make, dimension, placements)


def all_cases() -> Mapping[str, Case]:
    """Every case by its name."""
    found = {kind.replace(" ", "-"): by_hand(kind) for kind in BY_HAND}
    found |= {f"dtensor-{form}": distributed(form) for form in DISTRIBUTED}
    found |= {f"dtensor-{form}-deep": distributed(form, layers=2) for form in ("plain", "sequence")}
    found |= {f"ep-{form}": experts(form) for form in EXPERTS}
    found["ep-dispatched"] = plain(Dispatched, "ep", {"expert": {"ep": "shard"}})
    found["ep-looked-up"] = plain(LookedUp, "ep", {"table": {"ep": "shard"}})
    parts = {"columns": {"tp": "shard"}, "head": {"tp": "shard"}}
    found["tp-words"] = plain(DividedWords, "tp", parts, loss=None)
    parts = {"columns": {"tp": "shard"}, "rows": {"tp": "shard"}}
    found["tp-residual"] = plain(SummedWithResidual, "tp", parts)
    found["sharded-output"] = with_sharded_output()
    found["dp-norm"] = plain(NormedOverReplicas, "dp", {})
    found["dp-contrast"] = plain(Contrasted, "dp", {}, loss=None)
    kinds = {kind.__name__.lower(): fault for fault, (kind, *_) in FAULTS.items()}
    return found | {name: case_of(fault, right=True) for name, fault in kinds.items()}
