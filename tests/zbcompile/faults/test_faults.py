"""Faults: whatever breaks on one rank, every rank ends soon, with one message, and nothing is
corrupted."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zbcompile
from tests.support.faulty import INJECT, SCENARIOS, Order, Scenario, compile_before, make, rows
from tests.support.meshes import mesh_of
from tests.support.pool import DIED, Pool
from tests.support.training import compiled_once

RARE = pytest.mark.beyond_sample


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            scenario, id=f"{scenario.name} on rank {scenario.rank}", marks=[RARE] * (i > 1)
        )
        for i, scenario in enumerate(SCENARIOS)
    ],
)
def test_every_rank_ends_with_one_message(scenario: Scenario, pool: Pool) -> None:
    compile_before()
    outcomes = pool.outcomes(scenario.run, *scenario.args)
    for rank, outcome in enumerate(outcomes):
        if scenario.silent and rank == scenario.rank:
            assert outcome.error in (None, DIED)
            continue
        ended = outcome.value
        assert ended is not None, outcome.trace
        assert re.search(scenario.says, ended.message), ended.message
        assert ended.seconds < scenario.within
        assert ended.untouched


def broken_and_made_anew(store: str) -> tuple[str, Tensor, Tensor, Tensor]:
    """An error that all ranks raise before anything is sent leaves the pipeline as it was. Then a
    step fails, the process group is made anew in the same processes, and a new pipeline trains."""
    with compiled_once("faulty", exact=False):
        pipe = make()
        first = pipe.step(rows(), target=rows())
    for _ in range(2):
        with pytest.raises(zbcompile.PipelineError, match="target has 6 rows, the batch 8"):
            pipe.step(rows(8), target=rows(6))
    second = pipe.step(rows(), target=rows())
    INJECT.order, INJECT.calls = Order("raise", 1, "F", 0), 0
    with pytest.raises(zbcompile.FaultError):
        pipe.step(rows(), target=rows())
    INJECT.order = Order()
    with pytest.raises(zbcompile.PipelineError) as again:
        pipe.step(rows(), target=rows())
    pipe.close()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    with compiled_once("faulty", exact=False):
        return str(again.value), first, second, make().step(rows(), target=rows())


@pytest.mark.slow
def test_a_new_process_group_in_the_same_processes(pool: Pool, tmp_path: Path) -> None:
    compile_before()
    results = pool.run(broken_and_made_anew, str(tmp_path / "again"))
    for message, *losses in results:
        ended = r"this pipeline has ended: rank 1 failed at F1.*Call pipe\.close\(\)"
        assert re.search(ended, message)
        assert all(torch.equal(loss, losses[0]) for loss in losses)


def replica_that_ends_before_its_update() -> str:
    """One of two replicas ends, while the other waits for its part of the updated parameters,
    outside of any call."""
    pipe = make(mesh=mesh_of(dp=2, pp=1))
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, zero=1)
    pipe.step(rows(), target=rows())
    if dist.get_rank() == 1:
        os._exit(1)
    optimizer.step()
    with pytest.raises(zbcompile.FaultError) as raised:
        list(pipe.parameters())
    assert not pipe._watch.position.waits  # type: ignore[union-attr]
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.beyond_sample
def test_a_lost_replica_is_named_by_those_that_wait_for_its_update(pool: Pool) -> None:
    first, second = pool.outcomes(replica_that_ends_before_its_update)
    assert first.value is not None, first.trace
    assert first.value.startswith("rank 1 failed")
    assert second.error == DIED
