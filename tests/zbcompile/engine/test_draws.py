"""Random numbers next to the pipeline: ranks that share microbatches draw the same ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.parallel_models import Along, enter, leave
from tests.support.pool import Pool

MICROBATCHES, ROWS, LENGTH, WIDTH = 4, 2, 8, 16
SHAPE = (MICROBATCHES * ROWS, LENGTH, WIDTH)


def loss_of(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return sum((item.mean() for item in outputs), torch.zeros(()))


class ByHand(nn.Module):
    """Dropouts of what all ranks have, of this rank's columns, and of what is gathered from these."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.along, self.scale = Along(mesh, "tp"), nn.Parameter(torch.ones(WIDTH))
        self.columns = nn.Parameter(self.along.part(torch.ones(WIDTH), 0).clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        common, along = F.dropout(x * self.scale), self.along
        local = enter(torch.ones_like(common)[..., : len(self.columns)], along.group)
        dropped = F.dropout(local * self.columns)
        parts = along.gather(dropped.detach(), -1)
        total = leave(dropped.sum(-1, keepdim=True), along.group)
        last = F.dropout(torch.ones_like(parts) + 0 * parts)
        return common, parts, last * (1 + (total - total.detach()))


def drawn_by_hand(folder: Path) -> tuple[list[Tensor], Tensor]:
    """Returns the results of the dropouts on this rank, in two steps, and eager's in the first for
    what is replicated. A saved program gives the same gradients."""
    mesh, x = mesh_of(pp=1, tp=2), torch.ones(SHAPE)
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "loss": loss_of, "schedule": "1f1b"}
    options |= {"mesh": mesh, "placements": {"columns": {"tp": "shard"}}}
    pipe = zbcompile.pipeline(ByHand(mesh), **options)
    outputs = [out for _ in range(2) for out in pipe.step(x, target=x, return_outputs=True)[1]]
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters()}  # type: ignore[union-attr]
    pipe.program.save(folder)
    pipe.close()
    trusted = ["parallel_models::enter", "parallel_models::leave"]
    loaded = zbcompile.load(folder, ByHand(mesh).state_dict(), mesh=mesh, operators=trusted)
    for _ in range(2):
        loaded.step(x, target=x)
    assert all(torch.equal(p.grad, gradients[n]) for n, p in loaded.named_parameters())
    loaded.close()
    eager = []
    for microbatch in range(MICROBATCHES):
        torch.manual_seed(zbcompile.microbatch_seed(0, microbatch))
        eager.append(F.dropout(torch.ones(ROWS, *SHAPE[1:])))
    return outputs, torch.cat(eager)


@pytest.mark.slow
def test_what_is_common_has_eagers_mask_and_parts_repeat_theirs(tmp_path: Path, pool: Pool) -> None:
    (one, eager), (second, _) = pool.run(drawn_by_hand, tmp_path / "program")
    assert torch.equal(one[0], eager)
    assert torch.equal(*(part != 0 for part in one[1].chunk(2, -1)))  # one mask for both ranks
    for now, later in zip(one[:3], one[3:], strict=True):
        assert 0.3 < float((now != later).float().mean()) < 0.7  # drawn anew, by a half
    assert all(torch.equal(*item) for item in zip(one, second, strict=True))


def test_seeds_differ_by_step_microbatch_and_seed() -> None:
    numbers = [(step, microbatch) for step in range(20) for microbatch in range(20)]
    seeds = {zbcompile.microbatch_seed(*pair, seed) for pair in numbers for seed in range(5)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
