"""`pipe.as_schedule()`: a loop written for torch's schedules runs, with the losses and gradients of eager."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zbcompile
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from tests.support.training import (
    Case,
    Trained as Share,
    assert_same_tensors,
    gradients_of,
    join,
    pipeline_of,
    reference,
)

CASE = Case("mlp", "1f1b", 2, 4, steps=2)


def torch_loop() -> tuple[Share, list[Any], list[list[float]]]:
    """Inputs on the first rank alone, the target on the last one alone."""
    pipe = pipeline_of(CASE)
    schedule = pipe.as_schedule()
    first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
    gradients, returned, seen = [], [], []
    optimizer = None
    for batch in PROBLEMS[CASE.problem].batches(CASE.steps, 8):
        losses: list[torch.Tensor] = []
        inputs = batch.args if first else ()
        target = {"target": batch.target, "losses": losses} if last else {}
        returned.append(schedule.step(*inputs, **target))
        optimizer = optimizer or torch.optim.AdamW(pipe.parameters(), lr=1e-2, weight_decay=0.1)
        gradients.append(gradients_of(pipe))
        optimizer.step()
        optimizer.zero_grad()
        seen.append([float(loss) for loss in losses])
    returned.append(schedule.eval(*inputs))
    return Share([], gradients, dict(pipe.state_dict())), returned, seen


@pytest.mark.slow
def test_a_loop_for_torch_schedules(pool: Pool) -> None:
    shares, returned, losses = zip(*pool.run(torch_loop), strict=True)
    ours, theirs = join(shares), reference(CASE)
    for step in range(CASE.steps):
        assert_same_tensors(ours.gradients[step], theirs.gradients[step], f"gradient in step {step} of")
    assert losses[0] == [[], []]
    mean = [torch.tensor(found).sum() / CASE.microbatches for found in losses[1]]
    torch.testing.assert_close(mean, theirs.losses)
    assert returned[0] == [None, None, None]
    batch = PROBLEMS[CASE.problem].batches(CASE.steps, 8)[-1]
    model = PROBLEMS[CASE.problem].model()
    model.load_state_dict(theirs.state)
    torch.testing.assert_close(returned[1][-1], model(*batch.args))
    first = PROBLEMS[CASE.problem].batches(CASE.steps, 8)[0]
    torch.testing.assert_close(returned[1][0], PROBLEMS[CASE.problem].model()(*first.args))


def eval_first() -> tuple[torch.Tensor | None, list[float]]:
    (batch,) = PROBLEMS[CASE.problem].batches(1, 8)
    schedule, losses = pipeline_of(CASE).as_schedule(), list[torch.Tensor]()
    return schedule.eval(*batch.args, target=batch.target, losses=losses), [float(loss) for loss in losses]


def test_eval_before_any_step(pool: Pool) -> None:
    (nothing, none), (output, losses) = pool.run(eval_first, ranks=2)
    (batch,) = PROBLEMS[CASE.problem].batches(1, 8)
    assert nothing is None
    assert none == []
    torch.testing.assert_close(output, PROBLEMS[CASE.problem].model()(*batch.args))
    assert len(losses) == CASE.microbatches


def other_shapes() -> None:
    schedule = pipeline_of(CASE).as_schedule()
    for rows in (8, 4):
        schedule.step(torch.zeros(rows, 32), target=torch.zeros(rows, 32))


def missing_input() -> None:
    schedule = pipeline_of(CASE).as_schedule()
    for passes in (True, False):
        schedule.step(torch.zeros(8, 32), target=torch.zeros(8, 32) if passes else None)


@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize(
    ("wrong", "text"), [(other_shapes, r"received \[\[4, 32\]\]"), (missing_input, r"reads target, which this rank")]
)
def test_refusals(wrong: Any, text: str) -> None:
    with pytest.raises(zbcompile.PipelineError, match=text):
        wrong()
