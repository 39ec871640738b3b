"""What the proof of placements cannot look into is named, and compared by the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.pool import Pool
from zbcompile.inspect import main
from zbcompile.passes.verification.value_kinds import RULES


@torch.library.custom_op("unproven::average", mutates_args=())
def average(x: Tensor, group_name: str) -> Tensor:
    """The mean over the ranks, twice: several exchanges in one operator."""
    found, group = x.clone(), dist.distributed_c10d._resolve_process_group(group_name)
    for _ in range(2):
        dist.all_reduce(found, group=group)
        found = found / group.size()
    return found


average.register_fake(lambda x, group_name: torch.empty_like(x))
average.register_autograd(
    lambda ctx, gradient: (average(gradient.contiguous(), ctx.group), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "group", inputs[1]),
)


class Averaged(nn.Module):
    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(average(self.first(x), self.group))


def unproven(folder: Path) -> Any:
    """What could not be proven of a program, which is saved."""
    mesh = mesh_of(pp=1, tp=2)
    torch.manual_seed(0)
    model = Averaged(mesh.get_group("tp").group_name)
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", microbatches=2, loss=mse_loss)
    x = torch.ones(4, 2)
    for _ in range(2):
        pipe.step(x, target=x)
    pipe.program.save(folder)
    found = pipe.program.unproven
    pipe.close()
    return found


@pytest.mark.slow
def test_inspect_says_what_is_unproven(tmp_path: Path, pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = pool.run(unproven, tmp_path / "program", ranks=2)
    assert one == other
    assert "first.weight" in one["tp"]
    assert main([str(tmp_path / "program")]) == 0
    names = ", ".join(sorted(one["tp"]))
    said = f'not proven right along "tp" when compiling, so compared in the first step: {names}.'
    report = " ".join(capsys.readouterr().out.split())
    assert said in report
    assert f"proven when compiling, by version {RULES} of the rules" in report
