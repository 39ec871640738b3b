"""A step that differs between ranks leaves nothing behind."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.pool import Pool


def step(pipe: zbcompile.Pipeline, count: int) -> float:
    parts = [torch.full((2, 2), float(number)) for number in range(count)]
    return float(pipe.step(microbatches=[((part,), {}, part) for part in parts]))


def differs_once(overlap: bool) -> None:
    """One step in which replicas have other numbers of microbatches, between others."""
    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh_of(dp=2, pp=1)
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "loss": mse_loss}
    pipe = zbcompile.pipeline(model, mesh=mesh, **options)
    pipe.compile(torch.zeros(4, 2), target=torch.zeros(4, 2))
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, overlap=overlap)
    first = step(pipe, 2)
    if not overlap:
        optimizer.step()
        optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    said = r"rank 0 runs 2 microbatches with(.|\n)*rank 1 runs 4 microbatches with"
    with pytest.raises(zbcompile.PipelineError, match=said):
        step(pipe, (2, 4)[pipe.ranks.mesh.index("dp")])
    assert all(map(torch.equal, before, pipe.parameters()))
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert step(pipe, 2) < first
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.beyond_sample)])
def test_a_step_that_differs_between_replicas_changes_nothing(overlap: bool, pool: Pool) -> None:
    """The step has run when the difference is found: nothing was summed over replicas, no parameter
    updated, and the next step runs."""
    pool.run(differs_once, overlap, ranks=2)
