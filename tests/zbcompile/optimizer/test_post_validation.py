"""Updates that do not wait for the norm of all gradients, and are corrected afterwards: every bit
is the barrier's."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

import zbcompile
from tests.support.disturbed_training import (
    CLIPPED,
    INFINITE,
    MICROBATCHES,
    STEPS,
    History,
    assert_bitwise,
    disturbed,
    trained,
)
from tests.support.oracle import PROBLEMS, Batch
from tests.support.pool import FORKS, Pool
from tests.support.replicated import REPLICAS, mesh_of_replicas
from tests.support.training import ROWS, Case, assert_same_tensors, compiled_once, pipeline_of
from zbcompile.optimizer.post_validation import PostValidation


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("schedule", ["zb-h2", "zb-2p", "zb-v"])
def test_every_bit_is_that_of_the_barrier(schedule: str) -> None:
    """Over 40 steps, three that clip and a last one with an infinity."""
    case = Case("mlp", schedule, 2, MICROBATCHES)
    plain = PROBLEMS["mlp"].batches(STEPS, MICROBATCHES * ROWS)
    batches = [disturbed(batch, step) for step, batch in enumerate(plain)]
    with compiled_once("mlp", exact=True):
        late, after = (
            trained(pipeline_of(case), batches, validate=when) for when in ("before", "after")
        )
    assert_bitwise(after, late)
    assert len(after[3]) >= len((*CLIPPED, INFINITE))
    assert (
        "undone" in after[3] or schedule != "zb-v"
    )  # otherwise the second rank, which comes first here, knows it
    assert STEPS - len(after[3]) > STEPS / 2


def steps(
    pipe: zbcompile.Pipeline, optimizer: Any, numbers: range, folder: Path | None = None
) -> dict[str, Any]:
    for step, batch in enumerate(PROBLEMS["mlp"].batches(numbers.stop, MICROBATCHES * ROWS)):
        if step in numbers:
            arguments = disturbed(batch, step)
            pipe.step(*arguments.args, target=arguments.target)
            optimizer.step()
            optimizer.zero_grad()
            if folder is not None:
                zbcompile.save_checkpoint(folder, pipe, optimizer)
    return pipe.state_dict(full=True)


@pytest.mark.skipif(not FORKS, reason=f"torch does not survive a fork on {sys.platform}")
@pytest.mark.parametrize("step", [3, 4])
def test_a_process_that_dies_before_the_validation_resumes_from_its_checkpoint(
    step: int, tmp_path: Path
) -> None:
    """With the bits of a run that did not die. The update that was not validated is in no
    checkpoint: a checkpoint waits for it, and corrects that of step 4."""
    options: dict[str, Any] = {"lr": 1e-3, "clip": 1.0}
    case = Case("mlp", "zb-v", 2, MICROBATCHES)
    with compiled_once("mlp", exact=True):
        undisturbed, dying, resumed = (pipeline_of(case) for _ in range(3))
        expected = steps(undisturbed, undisturbed.optimizer(AdamW, **options), range(7))
        optimizer = dying.optimizer(AdamW, validate="after", **options)
        steps(dying, optimizer, range(step), tmp_path)
        child = os.fork()
        if child == 0:
            PostValidation.settle = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]
            steps(dying, optimizer, range(step, step + 2))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        batch = PROBLEMS["mlp"].batches(1, MICROBATCHES * ROWS)[0]
        resumed.compile(*batch.args, target=batch.target)
        again = resumed.optimizer(AdamW, validate="after", **options)
        results = zbcompile.load_checkpoint(tmp_path, resumed, again)
        assert results is not None
        assert results.step == step
        assert_same_tensors(steps(resumed, again, range(step, 7)), expected, "state dict:")


def beside_replicas(schedule: str) -> list[History]:
    torch.set_num_threads(1)
    mesh = mesh_of_replicas()
    problem = PROBLEMS["short-mlp"]
    results = []
    with compiled_once("short-mlp", exact=True):
        for options in ({"zero": 0}, *({"zero": zero, "validate": "after"} for zero in (0, 1))):
            pipe = zbcompile.pipeline(
                problem.model(),
                schedule=schedule,
                microbatches=MICROBATCHES,
                loss=problem.loss,
                mesh=mesh,
                exact=True,
            )
            plain = problem.batches(12, REPLICAS * MICROBATCHES * ROWS)
            local = [list(batch.parts(REPLICAS))[mesh["dp"].get_local_rank()] for batch in plain]
            arguments = [disturbed(batch, step) for step, batch in enumerate(local)]
            results.append(trained(pipe, arguments, **options))
            pipe.close()
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["zb-v", pytest.param("zb-h2", marks=pytest.mark.beyond_sample)]
)
def test_every_bit_is_the_same_beside_replicas(schedule: str, pool: Pool) -> None:
    """Whole, and divided among replicas; the norms of the ranks before come as messages."""
    for late, *after in pool.run(beside_replicas, schedule, ranks=4):
        for results in after:
            assert_bitwise(results, late)
            assert results[3]


@pytest.mark.slow
def test_half_precision_is_corrected_as_well() -> None:
    """Masters are rounded again, and the options are those of the step that is corrected."""
    plain = PROBLEMS["mlp"].batches(8, MICROBATCHES * ROWS)
    batches = [disturbed(batch, step) for step, batch in enumerate(plain)]
    halves = [Batch((b.args[0].bfloat16(),), {}, b.target.bfloat16()) for b in batches]  # type: ignore[union-attr]
    results = []
    for when in ("before", "after"):
        pipe = pipeline_of(Case("mlp", "zb-v", 2, MICROBATCHES))
        pipe.model.bfloat16()
        results.append(trained(pipe, halves, validate=when))
    assert_bitwise(results[1], results[0])
    assert "undone" in results[1][3]


def test_parameters_are_written_behind_the_validation() -> None:
    """A correction would replace what was written. `pipe.parameters()` waits for it."""
    pipe = pipeline_of(Case("mlp", "zb-v", 2, MICROBATCHES))
    optimizer = pipe.optimizer(AdamW, clip=1e-3, validate="after")
    batch = PROBLEMS["mlp"].batches(1, MICROBATCHES * ROWS)[0]
    saved = list(pipe.model.parameters())
    for where in (pipe.parameters, lambda: saved):
        pipe.step(*batch.args, target=batch.target)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            next(iter(where())).mul_(0.5)
    message = r"was written before its update was validated.* Call pipe\.parameters\(\) first"
    with pytest.raises(zbcompile.PipelineError, match=message):
        pipe.step(*batch.args, target=batch.target)


class Annealed(torch.optim.SGD):
    """Its state of a parameter is no tensor."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                count = self.state[parameter].setdefault("count", [0])
                count[0] += 1
                parameter.add_(parameter.grad, alpha=-0.1 / count[0])


@pytest.mark.slow
def test_state_that_is_no_tensor_is_corrected_as_well() -> None:
    results = []
    for when in ("before", "after"):
        pipe = pipeline_of(Case("mlp", "zb-v", 2, MICROBATCHES))
        # the first stages know a smaller norm
        optimizer = pipe.optimizer(Annealed, clip=0.2, validate=when)
        for batch in PROBLEMS["mlp"].batches(4, MICROBATCHES * ROWS):
            pipe.step(*batch.args, target=batch.target)
            optimizer.step()
            optimizer.zero_grad()
        results.append(pipe.state_dict(full=True))
    assert_same_tensors(results[1], results[0], "state dict:")
