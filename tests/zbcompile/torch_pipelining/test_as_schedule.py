"""`pipe.as_schedule()`: a loop written for torch's schedules runs, with the losses and gradients of eager."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

import zbcompile
from tests.support.oracle import MLP, PROBLEMS
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


class Scaled(MLP):
    """A keyword for the first stage, one for the last; the output is a mapping."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> Any:  # type: ignore[override]
        return {"output": super().forward(x * scale) + shift, "note": None}


def with_mean(output: Any, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return mse_loss(output["output"], target), output["output"].mean()


def scaled(microbatches: int, **options: Any) -> zbcompile.Pipeline:
    torch.manual_seed(0)
    return zbcompile.pipeline(
        Scaled(2), schedule="1f1b", microbatches=microbatches, loss=with_mean, timeout=60, **options
    )


INPUTS, SCALE, SHIFT = torch.ones(4, 32), torch.full((4, 1), 0.5), torch.full((4, 1), 2.0)


def keywords_of_stages() -> list[float]:
    schedule, losses = scaled(2).as_schedule(), list[torch.Tensor]()
    first = dist.get_rank() == 0
    for _ in range(2):
        if first:
            schedule.step(INPUTS, scale=SCALE)
        else:
            schedule.step(shift=SHIFT, target=INPUTS, losses=losses)
    return [float(loss) for loss in losses]


@pytest.mark.slow
def test_each_rank_passes_the_keywords_of_its_stages(pool: Pool) -> None:
    pipe = scaled(2, ranks=2)
    expected, _ = pipe.step_losses(INPUTS, scale=SCALE, shift=SHIFT, target=INPUTS)
    none, losses = pool.run(keywords_of_stages, ranks=2)
    assert none == []
    torch.testing.assert_close(torch.tensor(losses), torch.stack(expected))


@pytest.mark.slow
def test_an_evaluation_has_the_losses_of_a_step() -> None:
    """Of outputs that are not a tensor, and a loss function with metrics; also of fewer rows."""
    schedule, losses, steps = scaled(2, ranks=2).as_schedule(), list[torch.Tensor](), list[torch.Tensor]()
    given = {"scale": SCALE, "shift": SHIFT, "target": INPUTS}
    output = schedule.eval(INPUTS, **given, losses=losses)
    assert output["output"].shape == (4, 32)
    schedule.step(INPUTS, **given, losses=steps)
    torch.testing.assert_close(losses, steps)
    schedule.eval(INPUTS[:3], **{name: value[:3] for name, value in given.items()}, losses=losses)
    assert len(losses) == 1


def test_microbatches_that_are_already_split() -> None:
    """As torch 2.15 takes them: the step of the batch that they are parts of."""
    ours, theirs = scaled(2, ranks=2), scaled(2, ranks=2)
    split, losses = ours.as_schedule(), list[torch.Tensor]()
    for _ in range(2):
        parts = [(INPUTS[i : i + 2],) for i in (0, 2)]
        named = [{"scale": SCALE[i : i + 2], "shift": SHIFT[i : i + 2]} for i in (0, 2)]
        split.step(arg_mbs=parts, kwarg_mbs=named, target_mbs=[p for (p,) in parts], losses=losses)
    whole = [theirs.step(INPUTS, scale=SCALE, shift=SHIFT, target=INPUTS) for _ in range(2)]
    assert torch.equal((losses[0] + losses[1]) / 2, whole[1])
    assert_same_tensors(gradients_of(ours), gradients_of(theirs), "gradient of")


def test_outputs_may_stay_away() -> None:
    """return_outputs=False keeps none; the losses are those of a step that does."""
    (batch,) = PROBLEMS[CASE.problem].batches(1, 8)
    losses: list[list[torch.Tensor]] = [[], []]
    for wanted, found in zip((True, False), losses, strict=True):
        pipe = pipeline_of(CASE)
        output = pipe.as_schedule().step(*batch.args, target=batch.target, losses=found, return_outputs=wanted)
        assert (output is not None) == (pipe.program.output is not None) == wanted
    assert [len(each) for each in losses] == [4, 4]
    torch.testing.assert_close(*losses, rtol=0, atol=0)


def weighted(output: Any, target: torch.Tensor, *, table: torch.Tensor, factor: float) -> torch.Tensor:
    return mse_loss(output, target) * table.sum() * factor


@pytest.mark.slow
def test_loss_kwargs_go_whole_to_every_microbatch() -> None:
    """Also a tensor as long as the batch, of other values in the second step, and those of an evaluation."""
    (batch,) = PROBLEMS[CASE.problem].batches(1, 8)
    pipe = zbcompile.pipeline(PROBLEMS[CASE.problem].model(), schedule="1f1b", ranks=2, microbatches=4, loss=weighted)
    schedule, model, losses = pipe.as_schedule(), PROBLEMS[CASE.problem].model(), list[torch.Tensor]()
    for table in (torch.ones(8), torch.arange(8.0)):
        given = {"table": table, "factor": 0.5}
        for run in (schedule.step, schedule.eval):
            run(*batch.args, target=batch.target, losses=losses, loss_kwargs=given)
            theirs = [weighted(model(*part.args), part.target, **given) for part in batch.parts(4)]
            torch.testing.assert_close(losses, theirs)
        (sum(theirs) / 4).backward()
    torch.testing.assert_close(gradients_of(pipe), {name: p.grad for name, p in model.named_parameters()})


def other_shapes() -> None:
    schedule = pipeline_of(CASE).as_schedule()
    for rows in (8, 4):
        schedule.step(torch.zeros(rows, 32), target=torch.zeros(rows, 32))


def missing_input() -> None:
    schedule = pipeline_of(CASE).as_schedule()
    for passes in (True, False):
        schedule.step(torch.zeros(8, 32), target=torch.zeros(8, 32) if passes else None)


@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (other_shapes, r"received \[\[4, 32\]\]"),
        (missing_input, r"reads target, which this rank"),
    ],
)
def test_refusals(wrong: Any, text: str) -> None:
    with pytest.raises(zbcompile.PipelineError, match=text):
        wrong()
