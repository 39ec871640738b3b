"""The first step refuses gradients and losses that differ between ranks which should compute the
same: small models with one fault each in what their ranks exchange, after those that were found in
other libraries (Megatron-LM 7452, NeMo Automodel 3817), and one without it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.parallel_models import LENGTH, WIDTH, Along, Enter, Gather, Leave
from tests.support.pool import Pool
from tests.support.refused import said


class Columns(nn.Module):
    """A norm, columns and rows next to a residual; `fault` is the sum that is missing."""

    def __init__(self, mesh: Any, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along, self.fault, self.norm = Along(mesh, "tp"), fault, nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        for name, shape, dim in (
            ("columns", (2 * WIDTH, WIDTH), 0),
            ("rows", (WIDTH, 2 * WIDTH), 1),
        ):
            part = self.along.part(torch.randn(shape) / 4, dim).clone()
            setattr(self, name, nn.Parameter(part))

    def forward(self, x: Tensor) -> Tensor:
        y, group = self.norm(x), self.along.processes
        part = self.between(y if self.fault == "gradient" else Enter.apply(y, group))
        part = part if self.fault == "output" else Leave.apply(part, group)
        return x + F.dropout(part, 0.1) + self.router(x).sum(-1, keepdim=True)

    def between(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.columns)), self.rows)


class Sequence(Columns):
    """Norms on a part of the sequence, and a router on it whose choice all ranks must share; each
    rank differentiates its own part of what all have together."""

    def forward(self, x: Tensor) -> Tensor:
        local = self.along.part(x, 1)
        y = self.norm(local)
        y = y * self.router(y).softmax(-1).amax(-1, keepdim=True)
        part = self.between(self.along.gather(y, 1))
        return Gather.apply(local + self.along.scatter_sum(part, 1), self.along, 1)


SHARDS = {name: {"tp": "shard"} for name in ("columns", "rows")}
NORM, ROUTER = ({f"{name}.*": {"tp": "partial"}} for name in ("norm", "router"))
CASES: list[tuple[type[Columns], str, dict[str, Any], str]] = [  # the last: what is named
    (Columns, "gradient", SHARDS, "norm"),
    (Columns, "output", SHARDS, "loss"),
    (Sequence, "", SHARDS | NORM, "router"),
    (Sequence, "", SHARDS | NORM | ROUTER, ""),
]


def first_steps() -> list[str]:
    """Returns the refusal of each model's first step; empty if there is none."""
    results, mesh = [], mesh_of(pp=1, tp=2)
    for kind, fault, placements, _ in CASES:
        options: dict[str, Any] = {"mesh": mesh, "microbatches": 1, "placements": placements}
        torch.manual_seed(1)
        x = torch.randn(2, LENGTH, WIDTH)
        loss = lambda output, target: output.square().mean()  # noqa: E731
        pipe = zbcompile.pipeline(kind(mesh, fault), schedule="1f1b", loss=loss, **options)
        results.append(said(lambda pipe=pipe, x=x: pipe.step(x, target=x))[1])
        pipe.close()
    return results


@pytest.mark.slow
def test_the_first_step_names_what_differs(pool: Pool) -> None:
    """The parameter and the dimension, on both ranks; models without a fault are not refused."""
    one, second = pool.run(first_steps)
    assert one == second
    for case, text in zip(CASES, one, strict=True):
        assert (case[3] in text and "tp" in text) if case[3] else not text, (case, text)
