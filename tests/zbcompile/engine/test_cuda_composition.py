"""On CUDA, what else a pipeline does: replicas, optimizers that they divide, tensor parallelism,
checkpoints, autocast, faults. The functions are those of the CPU's tests; steps wait for no device
from the second one on.
"""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zbcompile
from tests.support.faulty import SCENARIOS, Scenario
from tests.support.on_gpus import four_gpus, on_gpu, one_gpu, two_gpus
from tests.support.oracle import MLP, PROBLEMS, eager_step
from tests.support.pool import DIED, Pool
from tests.support.replicated import in_one_process, replicated
from tests.support.sharded_optimizers import Training, at_levels, saved_and_moved
from tests.support.training import assert_same_tensors
from tests.zbcompile.engine.test_mesh import trained as trained_on_a_mesh

BOUND = 1e-4  # see test_cuda.py
FOUR: Any = {
    "ranks": 4,
    "backend": "nccl",
    "timeout": 300,
}  # whose processes are not forked: each begins by compiling


@four_gpus
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(
    ("problem", "schedule"), [("small-tied", "dualpipe"), ("small-dropout", "zb-h1")]
)
def test_two_replicas(problem: str, schedule: str, pool: Pool) -> None:
    """The loss and the gradients of the concatenated batch; a step inside no_sync before two
    others."""
    runs = pool.run(on_gpu, replicated, problem, schedule, "mean", 1, **FOUR)
    expected = on_gpu(in_one_process, problem, "mean", 3)
    for run in runs:
        torch.testing.assert_close(
            torch.stack(run.losses), torch.stack(expected.losses), rtol=BOUND, atol=0
        )
        torch.testing.assert_close(run.norm, expected.norm, rtol=BOUND, atol=0)
        for name, gradient in run.gradients.items():
            other = expected.gradients[name]
            assert (gradient - other).abs().max() <= BOUND * other.abs().max(), name


@four_gpus
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(
    "training",
    [
        Training("short-mlp", "zb-h1", dtype="bfloat16", clip=0.05),
        Training("small-tied", "zb-h1", vocab=1),
        Training("small-tied", "zb-v", overlap=True),
    ],
    ids=str,
)
def test_a_divided_optimizer(training: Training, pool: Pool) -> None:
    """Every bit of one that is not divided."""
    for whole, *divided in pool.run(on_gpu, at_levels, training, **FOUR):
        for found in divided:
            assert_same_tensors(found.losses, whole.losses, "loss of step")
            assert_same_tensors(found.norms, whole.norms, "norm of step")
            assert_same_tensors(found.state, whole.state, "state dict:")


@four_gpus
def test_checkpoints_move(pool: Pool, tmp_path: Path) -> None:
    """Saved with zero=0 and zero=1, loaded and saved under another schedule, level and number of
    replicas: one state, which a model on the host reads."""
    moves = (("zb-v", 1, 2), ("1f1b", 0, 4))
    pool.run(on_gpu, saved_and_moved, Training(), str(tmp_path), moves, **FOUR)
    states = [read_back(tmp_path / str(number)) for number in range(len(moves) + 1)]
    for found in states[1:]:
        assert_same_tensors(found, states[0], "checkpoint")


def read_back(folder: Path) -> dict[str, Tensor]:
    model = PROBLEMS["small-tied"].model()
    zbcompile.load_checkpoint(folder, model)
    return dict(model.state_dict())


@four_gpus
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(("kind", "schedule"), [("tp sequence", "zb-v"), ("tp plain", "zb-h1")])
def test_tensor_parallelism(kind: str, schedule: str, pool: Pool, tmp_path: Path) -> None:
    given = kind, schedule, ("tp", "pp"), tmp_path
    for loss, gradient, norm, forward, _ in pool.run(on_gpu, trained_on_a_mesh, *given, **FOUR):
        assert max(loss, gradient, norm, forward) <= BOUND


def autocast_steps() -> list[float]:
    """By how much losses and gradients under autocast differ from eager's, relative to the largest
    entry."""
    model = MLP()
    twin, found = copy.deepcopy(model), []
    pipe = zbcompile.pipeline(
        model, schedule="zb-v", ranks=2, microbatches=4, loss=F.mse_loss, exact=True
    )
    for step, batch in enumerate(PROBLEMS["mlp"].batches(3, 8)):
        with torch.autocast("cuda", torch.bfloat16):
            loss = pipe.step(*batch.args, target=batch.target)
            found.append(float((loss - eager_step(twin, F.mse_loss, batch, 4, step)).abs() / loss))
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        found.append(float((parameter.grad - other.grad).abs().max() / other.grad.abs().max()))
    return found


@one_gpu
def test_autocast() -> None:
    assert max(on_gpu(autocast_steps)) <= BOUND


ENDS = [
    each
    for each in SCENARIOS
    if each.name in ("an exception in W", "an exception in T")
    or each.name.startswith("a rank that a device waits for")
]


@two_gpus
@pytest.mark.parametrize("scenario", ENDS, ids=[each.name for each in ENDS])
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
