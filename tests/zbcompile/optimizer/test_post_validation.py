"""Updates that do not wait for the norm of all gradients, and are corrected afterwards: every bit
is the barrier's. Next to replicas: test_sharded_parameters.py."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

import zbcompile
from tests.support.oracle import PROBLEMS, Batch
from tests.support.pool import FORKS
from tests.support.training import ROWS, Case, assert_same_tensors, compiled_once, pipeline_of
from tests.zbcompile.optimizer.disturbed_training import (
    CLIPPED,
    MICROBATCHES,
    STEPS,
    assert_bitwise,
    disturbed,
    trained,
)
from zbcompile.optimizer.post_validation import PostValidation

PROBLEM = PROBLEMS["short-mlp"]


def batches_of(count: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    plain = PROBLEM.batches(count, MICROBATCHES * ROWS)
    batches = [disturbed(batch, step) for step, batch in enumerate(plain)]
    return [Batch((b.args[0].to(dtype),), {}, b.target.to(dtype)) for b in batches]  # type: ignore[union-attr]


def pipe_of(schedule: str = "zb-v") -> zbcompile.Pipeline:
    return pipeline_of(Case("short-mlp", schedule, 2, MICROBATCHES))


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    ("schedule", "dtype", "steps"),
    [
        ("zb-v", torch.float32, STEPS),
        ("zb-h2", torch.float32, STEPS),
        ("zb-v", torch.bfloat16, 8),
        ("zb-2p", torch.float32, STEPS),
    ],
)
def test_every_bit_is_that_of_the_barrier(schedule: str, dtype: torch.dtype, steps: int) -> None:
    """Over 40 steps, three that clip and a last one with an infinity. Masters are rounded again,
    and the options are those of the step that is corrected."""
    results = []
    with compiled_once(f"short-mlp {dtype}", exact=True):
        for when in ("before", "after"):
            pipe = pipe_of(schedule)
            pipe.model.to(dtype)
            results.append(trained(pipe, batches_of(steps, dtype), validate=when))
    assert_bitwise(*results)
    corrected = results[1][3]
    assert len(corrected) >= sum(step < steps for step in (*CLIPPED, STEPS - 1))
    # otherwise the second rank, which comes first here, knows it
    assert "undone" in corrected or schedule != "zb-v"
    assert steps - len(corrected) > steps / 2


def steps(
    pipe: zbcompile.Pipeline, optimizer: Any, numbers: range, folder: Path | None = None
) -> dict[str, Any]:
    for batch in batches_of(numbers.stop)[numbers.start :]:
        pipe.step(*batch.args, target=batch.target)
        optimizer.step()
        optimizer.zero_grad()
        if folder is not None:
            zbcompile.save_checkpoint(folder, pipe, optimizer)
    return dict(pipe.state_dict(full=True))


@pytest.mark.skipif(not FORKS, reason=f"torch does not survive a fork on {sys.platform}")
@pytest.mark.slow
def test_a_process_that_dies_before_the_validation_resumes_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    """With the bits of a run that did not die. The update that was not validated is in no
    checkpoint: a checkpoint waits for it, and corrects that of step 4."""
    options: dict[str, Any] = {"lr": 1e-3, "clip": 1.0}
    with compiled_once("short-mlp", exact=True):
        undisturbed, dying, resumed = (pipe_of() for _ in range(3))
        expected = steps(undisturbed, undisturbed.optimizer(AdamW, **options), range(6))
        optimizer = dying.optimizer(AdamW, validate="after", **options)
        steps(dying, optimizer, range(5), tmp_path)
        child = os.fork()
        if child == 0:
            kill = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            PostValidation.settle = kill  # type: ignore[method-assign, assignment]
            steps(dying, optimizer, range(5, 7))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        resumed.compile(*batches_of(1)[0].args, target=batches_of(1)[0].target)
        again = resumed.optimizer(AdamW, validate="after", **options)
        results = zbcompile.load_checkpoint(tmp_path, resumed, again)
        assert results is not None
        assert results.step == 5
        assert_same_tensors(steps(resumed, again, range(5, 6)), expected, "state dict:")


def test_parameters_are_written_behind_the_validation() -> None:
    """A correction would replace what was written. `pipe.parameters()` blocks until it is done."""
    pipe, (batch,) = pipe_of(), batches_of(1)
    optimizer = pipe.optimizer(AdamW, clip=1e-3, validate="after")
    saved = list(pipe.model.parameters())
    for where in (pipe.parameters, lambda: saved):
        pipe.step(*batch.args, target=batch.target)
        optimizer.step()
        optimizer.zero_grad()
        next(iter(where())).detach().mul_(0.5)
    message = r"was written before its update was validated.* Call pipe\.parameters\(\) first"
    with pytest.raises(zbcompile.PipelineError, match=message):
        pipe.step(*batch.args, target=batch.target)
