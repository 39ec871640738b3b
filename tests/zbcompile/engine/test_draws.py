"""Random numbers next to the pipeline: ranks that share microbatches draw the same ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.parallel_models import Along, enter, leave
from tests.support.pool import Pool

MICROBATCHES, ROWS, LENGTH, WIDTH = 4, 2, 8, 16
SHAPE = (MICROBATCHES * ROWS, LENGTH, WIDTH)


def loss_of(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return sum((item.mean() for item in outputs), torch.zeros(()))


def steps_of(pipe: Any, x: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of two steps, and the gradients."""
    outputs = [out for _ in range(2) for out in pipe.step(x, target=x, return_outputs=True)[1]]
    gradients = {name: p.grad for name, p in pipe.named_parameters()}
    pipe.close()
    return outputs, {name: getattr(g, "_local_tensor", g).clone() for name, g in gradients.items()}


class ByHand(nn.Module):
    """Dropouts of what all ranks along `name` have; of this rank's columns ("tp") or part of the
    sequence; and of what is gathered from these."""

    def __init__(self, mesh: Any, name: str) -> None:
        super().__init__()
        self.along, self.name = Along(mesh, name), name
        self.scale, local = nn.Parameter(torch.ones(WIDTH)), torch.ones(WIDTH)
        self.columns = nn.Parameter(self.along.part(local, 0).clone() if name == "tp" else local)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        common, along = F.dropout(x * self.scale), self.along
        if self.name == "cp":
            parts = along.gather(F.dropout(along.part(x, 1) * self.columns), 1)
            return common, parts, F.dropout(torch.ones_like(parts) + 0 * parts)
        local = enter(torch.ones_like(common)[..., : len(self.columns)], along.group)
        dropped = F.dropout(local * self.columns)
        parts = along.gather(dropped.detach(), -1)
        total = leave(dropped.sum(-1, keepdim=True), along.group)
        last = F.dropout(torch.ones_like(parts) + 0 * parts)
        return common, parts, last * (1 + (total - total.detach()))


def drawn_by_hand(name: str, folder: Path) -> tuple[list[Tensor], Tensor]:
    """Returns the results of the dropouts on this rank, in two steps, and eager's in the first for
    what is replicated. A saved program gives the same gradients (along "cp" ranks have their own
    graphs, which are not saved)."""
    mesh = mesh_of(pp=1, **{name: 2})
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "loss": loss_of, "schedule": "1f1b"}
    options["placements"] = {"columns": {"tp": "shard"}} if name == "tp" else {}
    pipe, x = zbcompile.pipeline(ByHand(mesh, name), mesh=mesh, **options), torch.ones(SHAPE)
    outputs, gradients = steps_of(pipe, x)
    if name == "tp":
        pipe.program.save(folder)
        trusted = ["parallel_models::enter", "parallel_models::leave"]
        state = ByHand(mesh, "tp").state_dict()
        loaded = zbcompile.load(folder, state, mesh=mesh, operators=trusted)
        for _ in range(2):
            loaded.step(x, target=x)
        assert all(torch.equal(p.grad, gradients[n]) for n, p in loaded.named_parameters())
        loaded.close()
    eager = []
    for microbatch in range(MICROBATCHES):
        torch.manual_seed(zbcompile.microbatch_seed(0, microbatch))
        eager.append(F.dropout(torch.ones(ROWS, *SHAPE[1:])))
    return outputs, torch.cat(eager)


def repeats(dropped: Tensor, dimension: int) -> bool:
    """Returns True if the parts of two ranks have one mask."""
    one, second = dropped.chunk(2, dimension)
    return torch.equal(one != 0, second != 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp", pytest.param("cp", marks=pytest.mark.beyond_sample)])
def test_what_is_common_has_eagers_mask_and_parts_repeat_theirs(
    name: str, tmp_path: Path, pool: Pool
) -> None:
    (one, eager), (second, _) = pool.run(drawn_by_hand, name, tmp_path / "program", ranks=2)
    assert torch.equal(one[0], eager)
    assert repeats(one[1], -1 if name == "tp" else 1)
    for now, later in zip(one[:3], one[3:], strict=True):
        assert 0.3 < float((now != later).float().mean()) < 0.7  # drawn anew, by a half
    assert all(torch.equal(*item) for item in zip(one, second, strict=True))


class Distributed(nn.Module):
    """Dropouts of a part of the sequence, and of what all ranks have."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.drop = nn.Embedding(3, WIDTH), nn.Dropout()
        self.gather, self.last = nn.Linear(WIDTH, WIDTH, False), nn.Linear(WIDTH, WIDTH)
        nn.init.ones_(self.embedding.weight)
        nn.init.eye_(self.gather.weight)
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "drop": SequenceParallel(use_local_output=True),
            "gather": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(self, mesh, plan)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.gather(self.drop(self.embedding(tokens)))
        return x, F.dropout(self.last(x))


def drawn_distributed() -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """Returns the results of steps, and under another schedule with recomputation."""
    mesh, results, tokens = mesh_of(pp=1, tp=2), [], torch.zeros(SHAPE[:2], dtype=torch.int64)
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "loss": loss_of, "exact": True}
    for schedule, recompute in (("1f1b", "off"), ("zb-h1", "full")):
        options |= {"schedule": schedule, "recompute": recompute, "mesh": mesh}
        results.append(steps_of(zbcompile.pipeline(Distributed(mesh["tp"]), **options), tokens))
    return results


@pytest.mark.slow
@pytest.mark.beyond_sample
def test_sequence_parallelism(pool: Pool) -> None:
    """On every rank and under every schedule the same."""
    runs = pool.run(drawn_distributed, ranks=2)
    first = runs[0][0][0]
    assert repeats(first[0], 1)
    for (outputs, gradients), (others, second) in runs:
        assert all(map(torch.equal, outputs + others, first + first))
        assert all(torch.equal(gradients[name], second[name]) for name in gradients)


def test_seeds_differ_by_step_microbatch_and_seed() -> None:
    numbers = [(step, microbatch) for step in range(20) for microbatch in range(20)]
    seeds = {zbcompile.microbatch_seed(*pair, seed) for pair in numbers for seed in range(5)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
