"""On CUDA, what else a pipeline does: replicas, optimizers that they divide, tensor parallelism,
autocast, faults. The functions are those of the CPU's tests; steps wait for no device from the second
one on."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zbcompile
from tests.support.faulty import SCENARIOS, Scenario
from tests.support.on_gpus import four_gpus, on_gpu, one_gpu, two_gpus
from tests.support.oracle import MLP, PROBLEMS, eager_step
from tests.support.pool import DIED, Pool
from tests.support.replicated import in_one_process, replicated
from tests.support.sharded_optimizers import Training, at_levels
from tests.support.training import Trained, assert_close, assert_same_tensors, gradients_of
from tests.zbcompile.engine.test_mesh import trained as trained_on_a_mesh

BOUND = 1e-4  # see test_cuda.py
FOUR: Any = {"ranks": 4, "backend": "nccl", "timeout": 300}  # each process begins by compiling


@four_gpus
def test_two_replicas(pool: Pool) -> None:
    """The loss and the gradients of the concatenated batch; a step inside no_sync before two
    others."""
    problem = "short-mlp"
    expected = on_gpu(in_one_process, problem, "mean", 3)
    for run in pool.run(on_gpu, replicated, problem, "zb-h1", "mean", 1, **FOUR):
        torch.testing.assert_close(run.norm, expected.norm, rtol=BOUND, atol=0)
        theirs = {name: expected.gradients[name] for name in run.gradients}
        ours = Trained(run.losses, [run.gradients], {})
        assert_close(ours, Trained(expected.losses, [theirs], {}), BOUND)


@four_gpus
def test_a_divided_optimizer(pool: Pool) -> None:
    """Every bit of one that is not divided."""
    training = Training("short-mlp", "zb-h1", dtype="bfloat16", clip=0.05)
    for undivided, divided in pool.run(on_gpu, at_levels, training, **FOUR):
        assert_same_tensors(divided.losses, undivided.losses, "loss of step")
        assert_same_tensors(divided.norms, undivided.norms, "norm of step")
        assert_same_tensors(divided.state, undivided.state, "state dict:")


@four_gpus
def test_tensor_parallelism(pool: Pool) -> None:
    model = "tp plain", "zb-h1", ("tp", "pp")
    for *errors, _ in pool.run(on_gpu, trained_on_a_mesh, *model, **FOUR):
        assert max(errors) <= BOUND


def autocast_steps() -> tuple[Trained, Trained]:
    """Returns losses and gradients, ours and eager's."""
    model = MLP()
    eager, losses, theirs = copy.deepcopy(model), [], []
    options: dict[str, Any] = {"schedule": "zb-v", "ranks": 2, "microbatches": 4, "exact": True}
    pipe = zbcompile.pipeline(model, loss=F.mse_loss, **options)
    for step, batch in enumerate(PROBLEMS["mlp"].batches(3, 8)):
        with torch.autocast("cuda", torch.bfloat16):
            losses.append(pipe.step(*batch.args, target=batch.target))
            theirs.append(eager_step(eager, F.mse_loss, batch, 4, step))
    ours = Trained(losses, [gradients_of(pipe)], {})
    return ours, Trained(theirs, [gradients_of(eager)], {})


@one_gpu
def test_autocast() -> None:
    assert_close(*on_gpu(autocast_steps), BOUND)


DEVICE = "a rank that a device waits for"
ENDS = [s for s in SCENARIOS if s.name == "an exception in W" or s.name.startswith(DEVICE)]


@two_gpus
@pytest.mark.parametrize("scenario", ENDS, ids=[item.name for item in ENDS])
def test_faults(scenario: Scenario, pool: Pool) -> None:
    """Also if the host does not wait, but the device: every rank ends, with one message."""
    outcomes = pool.outcomes(on_gpu, scenario.run, *scenario.args, backend="nccl")
    for rank, outcome in enumerate(outcomes):
        if scenario.silent and rank == scenario.rank:
            assert outcome.error in (None, DIED)
            continue
        ended = outcome.value
        assert ended is not None, outcome.trace or "the step succeeded"
        assert re.search(scenario.says, ended.message), ended.message
        assert ended.seconds < scenario.within
        assert ended.untouched
