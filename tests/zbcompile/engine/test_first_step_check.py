"""The first step refuses gradients and losses that differ between ranks which should compute the
same: small models with one fault each in what their ranks exchange, after those that were found in
other libraries (Megatron-LM 7452, NeMo Automodel 3817), and the same models without it."""

from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.parallel_models import LENGTH, WIDTH, Along, Enter, Gather, Leave
from tests.support.pool import Pool

WORDS = 12


class Faulty(nn.Module):
    """`fault`: what is wrong with it; "" for nothing. `run` computes with all parameters there are."""

    def __init__(self, mesh: Any, run: Callable[..., Tensor], fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along, self.run, self.fault = Along(mesh, "tp"), run, fault
        part, random = self.along.part, torch.randn
        for name in run.__code__.co_names:
            if name in ("norm", "mix", "router"):
                makers = {"norm": nn.LayerNorm(WIDTH), "mix": nn.Linear(WIDTH, WIDTH)}
                setattr(self, name, makers.get(name) or nn.Linear(WIDTH, 4, bias=False))
            created = {
                "columns": lambda: part(random(2 * WIDTH, WIDTH) / 4, 0),
                "rows": lambda: part(random(WIDTH, 2 * WIDTH) / 4, 1),
                "experts": lambda: part(random(4, WIDTH, WIDTH) / 4, 0),
                "scale": lambda: torch.ones(WIDTH // self.along.size),
                "table": lambda: random(WORDS, WIDTH),
            }.get(name)
            if created is not None:
                setattr(self, name, nn.Parameter(created().clone()))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    def enter(self, x: Tensor, unless: str = "never") -> Tensor:
        return x if self.fault == unless else Enter.apply(x, self.along.processes)

    def leave(self, x: Tensor, unless: str = "never") -> Tensor:
        return x if self.fault == unless else Leave.apply(x, self.along.processes)


def columns(m: Any, x: Tensor) -> Tensor:
    """A norm, columns and rows next to a residual."""
    entered = m.enter(m.norm(x), unless="gradient not summed")
    part = F.linear(F.gelu(F.linear(entered, m.columns)), m.rows)
    return x + F.dropout(m.leave(part, unless="output not summed"), 0.1)


def sliced(m: Any, x: Tensor) -> Tensor:
    """Every rank computes with its own columns of what all have, and the results are put together:
    a gated norm."""
    y = m.enter(m.mix(x), unless="slice without a sum")
    local = m.along.part(y, -1) * m.enter(m.scale, unless="shared norm of parts")
    start = m.along.rank * local.shape[-1]
    whole = torch.zeros_like(y).slice_scatter(local, -1, start, start + local.shape[-1])
    return x + m.leave(whole)


def sequence(m: Any, x: Tensor) -> Tensor:
    """Norms on a part of the sequence, and a router on it whose choice all ranks must share; each
    rank differentiates its own part of what all have together."""
    local = m.along.part(x, 1)
    y = m.norm(local)
    y = y * m.router(y).softmax(-1).amax(-1, keepdim=True)
    part = F.linear(F.gelu(F.linear(m.along.gather(y, 1), m.columns)), m.rows)
    return Gather.apply(local + m.along.scatter_sum(part, 1), m.along, 1)


def balanced(m: Any, x: Tensor) -> Tensor:
    """A router on what all ranks have, with a loss for its balance."""
    shares = m.router(x).softmax(-1)
    balance = F.one_hot(shares.argmax(-1), 4).float().mean((0, 1)) * shares.mean((0, 1))
    local = m.along.part(m.enter(shares, unless="partial gate"), -1)
    y = torch.einsum("bld,edf,ble->blf", m.enter(x), m.experts, local)
    return m.mix(x) + m.leave(y) + 0.01 * balance.sum()


def tied(m: Any, tokens: Tensor) -> Tensor:
    """A head whose rows are a slice of a table that every rank looks up as an embedding."""
    x, table = F.embedding(tokens, m.table), m.enter(m.table, unless="tied head")
    return m.leave(F.linear(m.enter(x), m.along.part(table, 0)).exp().sum(-1)).log()


SHARDS = {name: {"tp": "shard"} for name in ("columns", "rows", "experts")}
NORM, ROUTER = ({f"{name}.*": {"tp": "partial"}} for name in ("norm", "router"))
Case = tuple[Any, str, dict[str, Any], str]  # model, fault, placements, what is named
CASES: list[Case] = [
    (columns, "gradient not summed", SHARDS, "norm"),
    (columns, "output not summed", SHARDS, "loss"),
    (sequence, "", SHARDS | NORM, "router"),
    (sequence, "", SHARDS | NORM | ROUTER, ""),
]
FURTHER: list[Case] = [
    (sliced, "slice without a sum", {}, "mix"),
    (sliced, "shared norm of parts", {}, "scale"),
    (sliced, "", {}, ""),
    (sequence, "", SHARDS | ROUTER, "norm"),
    (balanced, "partial gate", SHARDS, "router"),
    (tied, "tied head", {}, "table"),
]


def first_steps(rare: bool) -> list[str]:
    """Returns the refusal of each model's first step; empty if there is none."""
    results, mesh = [], mesh_of(pp=1, tp=2)
    for run, fault, placements, _ in FURTHER if rare else CASES:
        model = Faulty(mesh, run, fault)
        names = [name for name, _ in model.named_parameters()]
        used = {p: item for p, item in placements.items() if any(fnmatch(n, p) for n in names)}
        options: dict[str, Any] = {"mesh": mesh, "microbatches": 1, "placements": used}
        torch.manual_seed(1)
        x = torch.randint(WORDS, (2, LENGTH)) if run is tied else torch.randn(2, LENGTH, WIDTH)
        loss = lambda output, target: output.square().mean()  # noqa: E731
        pipe = zbcompile.pipeline(model, schedule="1f1b", loss=loss, **options)
        try:
            pipe.step(x, target=x)
            results.append("")
        except zbcompile.PipelineError as error:
            results.append(str(error))
        pipe.close()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("rare", [False, pytest.param(True, marks=pytest.mark.beyond_sample)])
def test_the_first_step_names_what_differs(rare: bool, pool: Pool) -> None:
    """The parameter and the dimension, on both ranks; models without a fault are not refused."""
    one, second = pool.run(first_steps, rare)
    assert one == second
    for case, text in zip(FURTHER if rare else CASES, one, strict=True):
        assert (case[3] in text and "tp" in text) if case[3] else not text, (case, text)
