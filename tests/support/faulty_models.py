"""Small models with one fault each in what their ranks exchange, after those that were found in
other libraries (Megatron-LM 7452, NeMo Automodel 3817), and the same models without it."""

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.parallel_models import LENGTH, WIDTH, Along, Enter, Gather, Leave

VOCABULARY = 12


class LeaveTwice(torch.autograd.Function):
    """A sum forward, and the same sum backward: for losses that are parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return collectives.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return collectives.all_reduce(gradient, "sum", ctx.group), None


class Faulty(nn.Module):
    """`fault`: what is wrong with it; "" for nothing."""

    def __init__(self, mesh: Any, dimension: str, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along, self.fault = Along(mesh, dimension), fault
        self.size, self.processes = self.along.size, self.along.processes

    def enter(self, x: Tensor) -> Tensor:
        return Enter.apply(x, self.processes)  # type: ignore[no-any-return]

    def leave(self, x: Tensor) -> Tensor:
        return Leave.apply(x, self.processes)  # type: ignore[no-any-return]


class Columns(Faulty):
    """A norm, columns and rows next to a residual."""

    def __init__(self, mesh: Any, dimension: str, fault: str) -> None:
        super().__init__(mesh, dimension, fault)
        self.norm = nn.LayerNorm(WIDTH)
        self.columns = nn.Parameter(self.along.part(torch.randn(2 * WIDTH, WIDTH) / 4, 0).clone())
        self.rows = nn.Parameter(self.along.part(torch.randn(WIDTH, 2 * WIDTH) / 4, 1).clone())
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        entered = y if self.fault == "gradient not summed" else self.enter(y)
        entered = self.enter(entered) if self.fault == "gradient summed twice" else entered
        part = F.linear(F.gelu(F.linear(entered, self.columns)), self.rows)
        if self.fault == "bias added by all":
            part = part + self.bias
        out = part if self.fault == "output not summed" else self.leave(part)
        out = self.leave(out) if self.fault == "output summed twice" else out
        if self.fault == "sum in both directions":
            out = LeaveTwice.apply(part, self.along.group)
        out = out if self.fault == "bias added by all" else out + self.bias
        if self.fault == "dropout of a part":
            out = out * F.dropout(torch.ones_like(self.columns) + 0 * self.columns)[0]
        return x + F.dropout(out, 0.1)


class Sliced(Faulty):
    """Every rank computes with its own columns of what all have, and the results are put together:
    a gated norm."""

    def __init__(self, mesh: Any, dimension: str, fault: str) -> None:
        super().__init__(mesh, dimension, fault)
        self.scale = nn.Parameter(torch.ones(WIDTH // self.size))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x) if self.fault == "slice without a sum" else self.enter(self.mix(x))
        scale = self.scale if self.fault == "shared norm of parts" else self.enter(self.scale)
        local = self.along.part(y, -1) * scale
        start = self.along.rank * local.shape[-1]
        whole = torch.zeros_like(y).slice_scatter(local, -1, start, start + local.shape[-1])
        return x + self.leave(whole)


class Sequence(Faulty):
    """Norms on a part of the sequence, and a router on it whose choice all ranks must share."""

    def __init__(self, mesh: Any, dimension: str, fault: str) -> None:
        super().__init__(mesh, dimension, fault)
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.columns = nn.Parameter(self.along.part(torch.randn(2 * WIDTH, WIDTH) / 4, 0).clone())
        self.rows = nn.Parameter(self.along.part(torch.randn(WIDTH, 2 * WIDTH) / 4, 1).clone())

    def forward(self, x: Tensor) -> Tensor:
        local = self.along.part(x, 1)
        y = self.norm(local)
        y = y * self.router(y).softmax(-1).amax(-1, keepdim=True)
        part = F.linear(F.gelu(F.linear(self.along.gather(y, 1), self.columns)), self.rows)
        return self.whole(local + self.along.scatter_sum(part, 1))

    def whole(self, own: Tensor) -> Tensor:
        """Returns what all ranks have together, of which each differentiates its own part."""
        return Gather.apply(own, self.along, 1)  # type: ignore[no-any-return]


class Balanced(Faulty):
    """A router on what all ranks have, with a loss for its balance."""

    def __init__(self, mesh: Any, dimension: str, fault: str) -> None:
        super().__init__(mesh, dimension, fault)
        self.router, self.out = nn.Linear(WIDTH, 4, bias=False), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(self.along.part(torch.randn(4, WIDTH, WIDTH) / 4, 0).clone())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        counts = F.one_hot(shares.argmax(-1), 4).float().mean((0, 1))
        if self.fault == "auxiliary loss counted per rank":
            counts = collectives.all_reduce(counts, "sum", self.along.group)
        balance = (counts * shares.mean((0, 1))).sum()
        local = self.along.part(shares if self.fault == "partial gate" else self.enter(shares), -1)
        y = torch.einsum("bld,edf,ble->blf", self.enter(x), self.experts, local)
        return self.out(x) + self.leave(y) + 0.01 * balance


class Tied(Faulty):
    """A head whose rows are a slice of a table that every rank looks up as an embedding."""

    def __init__(self, mesh: Any, dimension: str, fault: str) -> None:
        super().__init__(mesh, dimension, fault)
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.table)
        table = self.table if self.fault == "tied head" else self.enter(self.table)
        logits = F.linear(self.enter(x), self.along.part(table, 0))
        return self.leave(logits.exp().sum(-1)).log()


class Counted(Faulty):
    """A loss over the words of this rank's part of a sequence that count."""

    def __init__(self, mesh: Any, dimension: str, fault: str) -> None:
        super().__init__(mesh, dimension, fault)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        local = self.along.part(x, 1)
        counts = local[..., 0] > 0
        number = (
            counts.sum()
            if self.fault
            else collectives.all_reduce(counts.sum(), "sum", self.along.group)
        )
        return (self.layer(local).square().mean(-1) * counts).sum() / number


class Attending(Faulty):
    """Attention over a sequence that is divided along "cp"; keys are gathered."""

    def __init__(self, mesh: Any, dimension: str, fault: str) -> None:
        super().__init__(mesh, dimension, fault)
        self.key, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        local = self.along.part(x, 1)
        key = self.key(local)
        if self.fault == "gathered without a gradient":
            keys = Gather.apply(key, self.along, 1)
        else:
            keys = self.along.gather(key, 1)
        return self.out((local @ keys.transpose(1, 2)).softmax(-1) @ keys).square().mean()


class Norming(Faulty):
    """Writes the mean of its part of a sequence into a buffer that all ranks share."""

    def __init__(self, mesh: Any, dimension: str, fault: str) -> None:
        super().__init__(mesh, dimension, fault)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        local = self.along.part(x, 1).detach().mean((0, 1))
        self.mean.copy_(
            local
            if self.fault
            else collectives.all_reduce(local, "sum", self.along.group) / self.size
        )
        return self.layer(x) - self.mean


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def _itself(output: Tensor, target: Tensor) -> Tensor:
    return output


_SHARDS = {"columns": {"tp": "shard"}, "rows": {"tp": "shard"}, "experts": {"tp": "shard"}}
_PARTS = {"norm.*": {"tp": "partial"}, "router.*": {"tp": "partial"}}


class Fault(NamedTuple):
    """A model with a fault, the dimension, the placements, and what the refusal of the first step
    says; None: the first step cannot see it, since all ranks compute the same wrong number."""

    model: Callable[..., Faulty]
    dimension: str
    placements: dict[str, Any]
    says: str | None


FAULTS = {
    "gradient not summed": Fault(Columns, "tp", _SHARDS, "norm"),
    "gradient summed twice": Fault(Columns, "tp", _SHARDS, None),
    "output not summed": Fault(Columns, "tp", _SHARDS, "loss"),
    "output summed twice": Fault(Columns, "tp", _SHARDS, None),
    "sum in both directions": Fault(Columns, "tp", _SHARDS, None),
    "bias added by all": Fault(Columns, "tp", _SHARDS, None),
    "dropout of a part": Fault(Columns, "tp", _SHARDS, None),
    "slice without a sum": Fault(Sliced, "tp", {}, "mix"),
    "shared norm of parts": Fault(Sliced, "tp", {}, "scale"),
    "norm of a sequence's part": Fault(
        Sequence, "tp", _SHARDS | {"router.*": {"tp": "partial"}}, "norm"
    ),
    "partial router": Fault(Sequence, "tp", _SHARDS | {"norm.*": {"tp": "partial"}}, "router"),
    "partial gate": Fault(Balanced, "tp", _SHARDS, "router"),
    "auxiliary loss counted per rank": Fault(Balanced, "tp", _SHARDS, None),
    "tied head": Fault(Tied, "tp", {}, "table"),
    "mean over differing counts": Fault(Counted, "cp", {}, None),
    "gathered without a gradient": Fault(Attending, "cp", {}, None),
    "buffer of a part": Fault(Norming, "cp", {}, None),
}
RIGHT = {kind: fault for fault, (kind, *_) in FAULTS.items()}  # one of the faults of each model


def step_of(fault: str, right: bool, mesh: Any) -> tuple[nn.Module, dict[str, Any], Tensor]:
    """The model with its fault, or the `right` one, the options of its pipeline, and a batch, which
    is also the target."""
    kind, dimension, placements, _ = FAULTS[fault]
    placements = placements | _PARTS if right and kind is Sequence else placements
    model = kind(mesh, dimension, "" if right else fault)
    names = [name for name, _ in model.named_parameters()]
    placements = {
        pattern: item
        for pattern, item in placements.items()
        if any(fnmatch(n, pattern) for n in names)
    }
    loss = _itself if kind in (Counted, Attending) else _mean
    torch.manual_seed(1)
    x = torch.randint(VOCABULARY, (2, LENGTH)) if kind is Tied else torch.randn(2, LENGTH, WIDTH)
    return model, {"loss": loss, "placements": placements}, x
