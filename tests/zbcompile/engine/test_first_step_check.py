"""The first step refuses gradients and losses that differ between ranks which should compute the
same: small models with one fault each in what their ranks exchange, after those that were found in
other libraries (Megatron-LM 7452, NeMo Automodel 3817), and the same models without it."""

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.parallel_models import LENGTH, WIDTH, Along, Enter, Gather, Leave
from tests.support.pool import Pool

VOCABULARY = 12


class Faulty(nn.Module):
    """`fault`: what is wrong with it; "" for nothing."""

    def __init__(self, mesh: Any, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along, self.fault = Along(mesh, "tp"), fault
        self.size, self.processes = self.along.size, self.along.processes

    def enter(self, x: Tensor) -> Tensor:
        return Enter.apply(x, self.processes)  # type: ignore[no-any-return]

    def leave(self, x: Tensor) -> Tensor:
        return Leave.apply(x, self.processes)  # type: ignore[no-any-return]


class Columns(Faulty):
    """A norm, columns and rows next to a residual."""

    def __init__(self, mesh: Any, fault: str) -> None:
        super().__init__(mesh, fault)
        self.norm = nn.LayerNorm(WIDTH)
        self.columns = nn.Parameter(self.along.part(torch.randn(2 * WIDTH, WIDTH) / 4, 0).clone())
        self.rows = nn.Parameter(self.along.part(torch.randn(WIDTH, 2 * WIDTH) / 4, 1).clone())
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        entered = y if self.fault == "gradient not summed" else self.enter(y)
        part = F.linear(F.gelu(F.linear(entered, self.columns)), self.rows)
        out = part if self.fault == "output not summed" else self.leave(part)
        return x + F.dropout(out + self.bias, 0.1)


class Sliced(Faulty):
    """Every rank computes with its own columns of what all have, and the results are put together:
    a gated norm."""

    def __init__(self, mesh: Any, fault: str) -> None:
        super().__init__(mesh, fault)
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

    def __init__(self, mesh: Any, fault: str) -> None:
        super().__init__(mesh, fault)
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

    def __init__(self, mesh: Any, fault: str) -> None:
        super().__init__(mesh, fault)
        self.router, self.out = nn.Linear(WIDTH, 4, bias=False), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(self.along.part(torch.randn(4, WIDTH, WIDTH) / 4, 0).clone())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        counts = F.one_hot(shares.argmax(-1), 4).float().mean((0, 1))
        balance = (counts * shares.mean((0, 1))).sum()
        local = self.along.part(shares if self.fault == "partial gate" else self.enter(shares), -1)
        y = torch.einsum("bld,edf,ble->blf", self.enter(x), self.experts, local)
        return self.out(x) + self.leave(y) + 0.01 * balance


class Tied(Faulty):
    """A head whose rows are a slice of a table that every rank looks up as an embedding."""

    def __init__(self, mesh: Any, fault: str) -> None:
        super().__init__(mesh, fault)
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.table)
        table = self.table if self.fault == "tied head" else self.enter(self.table)
        logits = F.linear(self.enter(x), self.along.part(table, 0))
        return self.leave(logits.exp().sum(-1)).log()


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


_SHARDS = {"columns": {"tp": "shard"}, "rows": {"tp": "shard"}, "experts": {"tp": "shard"}}
_PARTS = {"norm.*": {"tp": "partial"}, "router.*": {"tp": "partial"}}


class Fault(NamedTuple):
    """A model with a fault, the placements, and what the refusal of the first step names."""

    model: Callable[..., Faulty]
    placements: dict[str, Any]
    says: str


FAULTS = {
    "gradient not summed": Fault(Columns, _SHARDS, "norm"),
    "output not summed": Fault(Columns, _SHARDS, "loss"),
    "slice without a sum": Fault(Sliced, {}, "mix"),
    "shared norm of parts": Fault(Sliced, {}, "scale"),
    "norm of a sequence's part": Fault(Sequence, _SHARDS | {"router.*": {"tp": "partial"}}, "norm"),
    "partial router": Fault(Sequence, _SHARDS | {"norm.*": {"tp": "partial"}}, "router"),
    "partial gate": Fault(Balanced, _SHARDS, "router"),
    "tied head": Fault(Tied, {}, "table"),
}
RIGHT = {kind: fault for fault, (kind, *_) in FAULTS.items()}  # one of the faults of each model


def first_step(fault: str, right: bool) -> str:
    """Returns the refusal of a model's first step; empty if there is none."""
    kind, placements, _ = FAULTS[fault]
    placements = placements | _PARTS if right and kind is Sequence else placements
    mesh = mesh_of(pp=1, tp=2)
    model = kind(mesh, "" if right else fault)
    names = [name for name, _ in model.named_parameters()]
    placements = {
        pattern: item
        for pattern, item in placements.items()
        if any(fnmatch(name, pattern) for name in names)
    }
    torch.manual_seed(1)
    x = torch.randint(VOCABULARY, (2, LENGTH)) if kind is Tied else torch.randn(2, LENGTH, WIDTH)
    pipe = zbcompile.pipeline(
        model, mesh=mesh, schedule="1f1b", microbatches=1, loss=_mean, placements=placements
    )
    try:
        pipe.step(x, target=x)
    except zbcompile.PipelineError as error:
        return str(error)
    finally:
        pipe.close()
    return ""


def first_steps(cases: list[tuple[str, bool]]) -> list[str]:
    return [first_step(*case) for case in cases]


@pytest.mark.slow
def test_the_first_step_names_what_differs(pool: Pool) -> None:
    """The parameter and the dimension, on both ranks; models without a fault are not refused."""
    cases = [(fault, False) for fault in FAULTS] + [(fault, True) for fault in RIGHT.values()]
    one, second = pool.run(first_steps, cases, ranks=2, timeout=240)
    assert one == second
    for (fault, right), text in zip(cases, one, strict=True):
        if right:
            assert not text, (fault, text)
        else:
            assert FAULTS[fault].says in text, (fault, text)
            assert "tp" in text
