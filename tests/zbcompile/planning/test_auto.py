"""`schedule="auto"` takes the name with the shortest predicted step, `memory=` the first
recomputation that fits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from tests.support.oracle import PROBLEMS, Batch, Problem, eager_step
from tests.support.training import assert_same_tensors, gradients_of
from zbcompile.planning.auto import names_by_placement
from zbcompile.prediction.memory_limit import peak_bytes
from zbcompile.prediction.predict import predicted_costs
from zbcompile.schedules import build, simulate

PROBLEM, ROWS = PROBLEMS["short-mlp"], 8


def pipeline(
    schedule: str = "auto", problem: Problem = PROBLEM, **options: Any
) -> tuple[zbcompile.Pipeline, Batch]:
    (batch,) = problem.batches(1, ROWS)
    options = {"ranks": 2, "microbatches": 4, "exact": True, **options}
    pipe = zbcompile.pipeline(problem.model(), schedule=schedule, loss=problem.loss, **options)
    return pipe.compile(*batch.args, target=batch.target), batch


@pytest.mark.slow
def test_bits_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another shape keeps the schedule."""
    pipe, batch = pipeline(microbatches=None)
    plan, count = pipe.program.plan, pipe.program.schedule.microbatches
    assert plan.startswith(f"auto: {pipe.program.schedule.name}, predicted step ")
    assert f"zbcompile: {plan}\n" in capsys.readouterr().out
    model, (more,) = PROBLEM.model(), PROBLEM.batches(1, 2 * ROWS)
    for step, item in enumerate((batch, more)):
        loss = pipe.step(*item.args, target=item.target)
        assert torch.equal(loss, eager_step(model, PROBLEM.loss, item, count, step))
    assert_same_tensors(gradients_of(pipe), gradients_of(model), "gradient of")
    pipe.program.save(tmp_path / "program")
    assert zbcompile.load(tmp_path / "program").program.plan == plan


@pytest.mark.slow
def test_no_schedule_has_a_shorter_predicted_step() -> None:
    """Options of the user are kept: cuts, chunks, a sharded output layer."""
    pipe, _ = pipeline(exact=False, vocab="off")
    best = simulate(pipe.program.schedule, predicted_costs(pipe.program)).makespan
    for name in ("1f1b", "zb-v"):
        program = pipeline(name, exact=False)[0].program
        predicted = simulate(program.schedule, predicted_costs(program)).makespan
        assert predicted >= best * (1 - 1e-6), name
    named = pipeline(balance=("layers.2",))[0].program
    assert named.stages[1].parameters[0].startswith("layers.2.")
    assert (named.schedule.stages, named.schedule.placement.kind) == (2, "linear")
    with pytest.raises(zbcompile.PartitionError, match="names 2 cuts; the schedule has 2 stages"):
        pipeline(balance=("layers.1", "layers.2"))


class Wide(nn.Linear):
    """A layer that keeps much next to its parameters, most of it elementwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sin(torch.exp(-super().forward(x))) * x)


def within(memory: float | None, **options: Any) -> Any:
    options = {"schedule": "1f1b", "ranks": 2, "microbatches": 4, "exact": True, **options}
    model = nn.Sequential(*(Wide(16, 16) for _ in range(4)))
    pipe = zbcompile.pipeline(model, loss=nn.functional.mse_loss, memory=memory, **options)
    return pipe.compile(torch.ones(256, 16), target=torch.ones(256, 16)).program


@pytest.mark.slow
def test_a_limit_of_memory_is_kept_by_recomputing() -> None:
    """The recomputation of the user is kept."""
    policies = ("hints", "selective", "full")
    peaks = [peak_bytes(within(None, recompute=policy)) for policy in policies]
    assert peaks[0] > peaks[1] > peaks[2]
    program = within(peaks[1])
    assert peak_bytes(program) <= peaks[1]
    assert program.choices.recompute == "selective"
    with pytest.raises(zbcompile.PartitionError, match=r"memory=.* with recompute='off'"):
        within(peaks[1], recompute="off")


def test_schedules_that_change_memory_or_bits_are_not_chosen() -> None:
    """Two copies of the model, and weight gradients in another order than that of the
    microbatches."""
    groups = names_by_placement(lambda name: build(name, 4, 8)).values()
    result = {name for group in groups for name in group}
    assert {"dualpipe", "zb-h1-lazy", "auto"}.isdisjoint(result)
    assert {"1f1b", "zb-h1", "zb-v", "interleaved-1f1b"} <= result
