"""On CUDA, what else a pipeline does: replicas, optimizers that they divide, tensor parallelism,
checkpoints, autocast, faults. The functions are those of the CPU's tests; steps wait for no device
from the second one on.
"""

import re
from typing import Any

import pytest
import torch

from tests.support.faulty import SCENARIOS, Scenario
from tests.support.on_gpus import four_gpus, on_gpu, two_gpus
from tests.support.pool import DIED, Pool
from tests.support.replicated import in_one_process, replicated

BOUND = 1e-4  # see test_cuda.py
FOUR: Any = {
    "ranks": 4,
    "backend": "nccl",
    "timeout": 300,
}  # whose processes are not forked: each begins by compiling


@four_gpus
def test_two_replicas(pool: Pool) -> None:
    """The loss and the gradients of the concatenated batch; a step inside no_sync before two
    others."""
    problem = "small-dropout"
    runs = pool.run(on_gpu, replicated, problem, "zb-h1", "mean", 1, **FOUR)
    expected = on_gpu(in_one_process, problem, "mean", 3)
    for run in runs:
        torch.testing.assert_close(
            torch.stack(run.losses), torch.stack(expected.losses), rtol=BOUND, atol=0
        )
        torch.testing.assert_close(run.norm, expected.norm, rtol=BOUND, atol=0)
        for name, gradient in run.gradients.items():
            second = expected.gradients[name]
            assert (gradient - second).abs().max() <= BOUND * second.abs().max(), name


ENDS = [
    each
    for each in SCENARIOS
    if each.name == "an exception in W" or each.name.startswith("a rank that a device waits for")
]


@two_gpus
@pytest.mark.parametrize("scenario", ENDS, ids=[item.name for item in ENDS])
def test_faults(scenario: Scenario, pool: Pool) -> None:
    """Also if the host does not wait, but the device: every rank ends, with one message."""
    outcomes = pool.outcomes(on_gpu, scenario.run, *scenario.args, backend="nccl")
    pool.group = None
    for rank, outcome in enumerate(outcomes):
        if scenario.silent and rank == scenario.rank:
            assert outcome.error in (None, DIED)
            continue
        ended = outcome.value
        assert ended is not None, outcome.trace or "the step succeeded"
        assert re.search(scenario.says, ended.message), ended.message
        assert ended.seconds < scenario.within
        assert ended.untouched
