"""`schedule="auto"` takes the name with the shortest predicted step, `memory=` the first
recomputation that fits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbcompile
from tests.support.oracle import PROBLEMS, Batch, Problem, eager_step
from tests.support.pool import Pool
from tests.support.training import compiled_once
from zbcompile.planning.auto import names_by_placement
from zbcompile.prediction.memory_limit import peak_bytes
from zbcompile.prediction.predict import predicted_costs
from zbcompile.schedules import build, simulate

PROBLEM = PROBLEMS["mlp"]
ROWS = 8


def pipeline(
    schedule: str = "auto", problem: Problem = PROBLEM, **options: Any
) -> tuple[zbcompile.Pipeline, Batch]:
    (batch,) = problem.batches(1, ROWS)
    options = {"ranks": 2, "microbatches": 4, "exact": True, **options}
    pipe = zbcompile.pipeline(problem.model(), schedule=schedule, loss=problem.loss, **options)
    return pipe.compile(*batch.args, target=batch.target), batch


@pytest.mark.slow
def test_bits_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, batch = pipeline(microbatches=None)
    plan = pipe.program.plan
    assert plan.startswith(f"auto: {pipe.program.schedule.name}, predicted step ")
    assert f"zbcompile: {plan}\n" in capsys.readouterr().out
    loss, model, count = (
        pipe.step(*batch.args, target=batch.target),
        PROBLEM.model(),
        pipe.program.schedule.microbatches,
    )
    assert torch.equal(loss, eager_step(model, PROBLEM.loss, batch, count, 0))
    expected = dict(model.named_parameters())
    assert all(torch.equal(p.grad, expected[name].grad) for name, p in pipe.named_parameters())  # type: ignore[arg-type]
    pipe.program.save(tmp_path / "program")
    assert zbcompile.load(tmp_path / "program").program.plan == plan


@pytest.mark.slow
def test_no_schedule_has_a_shorter_predicted_step() -> None:
    pipe, _ = pipeline(exact=False, vocab="off")
    best = simulate(pipe.program.schedule, predicted_costs(pipe.program)).makespan
    for name in ("1f1b", "zb-h1", "zb-v", "dualpipe-v", "interleaved-zb"):
        with compiled_once("mlp", exact=False):
            program = pipeline(name, exact=False)[0].program
        predicted = simulate(program.schedule, predicted_costs(program)).makespan
        assert predicted >= best * (1 - 1e-6), name


@pytest.mark.slow
def test_what_is_asked_for_is_kept() -> None:
    named, _ = pipeline(balance=("layers.4",))
    assert named.program.stages[1].parameters[0].startswith("layers.4.")
    assert (named.program.schedule.stages, named.program.schedule.placement.kind) == (2, "linear")
    looped, _ = pipeline(chunks=2)
    assert looped.program.schedule.stages == 4
    with pytest.raises(zbcompile.PartitionError, match="names 2 cuts; the schedule has 2 stages"):
        pipeline(balance=("layers.2", "layers.4"))


@pytest.mark.slow
def test_another_shape_keeps_the_schedule() -> None:
    pipe, batch = pipeline()
    pipe.step(*batch.args, target=batch.target)
    (more,) = PROBLEM.batches(1, 2 * ROWS)
    loss = pipe.step(*more.args, target=more.target)
    assert torch.equal(loss, eager_step(PROBLEM.model(), PROBLEM.loss, more, 4, 1))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("barriers", [1, 2])
def test_a_sharded_output_layer(barriers: int) -> None:
    problem = PROBLEMS["gpt"]
    pipe, batch = pipeline(problem=problem, vocab=barriers, exact=False)
    loss = pipe.step(*batch.args, target=batch.target)
    assert pipe.program.vocabulary is not None
    assert pipe.program.vocabulary.barriers == barriers
    assert torch.allclose(loss, eager_step(problem.model(), problem.loss, batch, 4, 0), rtol=2e-6)


def chosen_in_processes() -> tuple[str, float]:
    (batch,) = PROBLEM.batches(1, ROWS)
    pipe = zbcompile.pipeline(
        PROBLEM.model(), schedule="auto", loss=PROBLEM.loss, exact=True, microbatches=4
    )
    return f"{pipe.compile(*batch.args, target=batch.target).program.plan}", float(
        pipe.step(*batch.args, target=batch.target)
    )


@pytest.mark.slow
def test_all_ranks_choose_alike(pool: Pool) -> None:
    (plan, loss), (second, same) = pool.run(chosen_in_processes)
    assert (plan, loss) == (second, same)
    assert loss == float(
        eager_step(PROBLEM.model(), PROBLEM.loss, PROBLEM.batches(1, ROWS)[0], 4, 0)
    )


class Wide(nn.Module):
    """Layers that keep much next to their parameters, most of it elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(torch.sin(torch.exp(-layer(x))) * x)
        return x


def within(memory: float | None, **options: Any) -> zbcompile.Pipeline:
    options = {"schedule": "1f1b", "ranks": 2, "microbatches": 4, "exact": True, **options}
    pipe = zbcompile.pipeline(Wide(), loss=nn.functional.mse_loss, memory=memory, **options)
    rows = torch.ones(256, 16)
    return pipe.compile(rows, target=rows)


@pytest.mark.slow
def test_a_limit_of_memory_is_kept_by_recomputing() -> None:
    policies = ("hints", "selective", "full")
    peaks = [peak_bytes(within(None, recompute=policy).program) for policy in policies]
    assert peaks[0] > peaks[1] > peaks[2]
    for policy, peak in zip(policies, peaks, strict=True):
        program = within(peak).program
        assert peak_bytes(program) <= peak
        assert program.choices.recompute == policy
    assert peak_bytes(within(peaks[2], schedule="auto").program) <= peaks[2]
    with pytest.raises(
        zbcompile.PartitionError, match=r"memory=.* is too small: under .* with recompute='full'"
    ):
        within(10_000)


@pytest.mark.slow
def test_the_recomputation_that_is_asked_for_is_kept() -> None:
    peak = peak_bytes(within(None, recompute="selective").program)
    assert within(peak, recompute="selective").program.choices.recompute == "selective"
    with pytest.raises(zbcompile.PartitionError, match=r"memory=.* with recompute='off'"):
        within(peak, recompute="off")


def test_schedules_that_change_memory_or_bits_are_not_chosen() -> None:
    """Two copies of the model, and weight gradients in another order than that of the
    microbatches."""
    result = [
        name
        for item in names_by_placement(lambda name: build(name, 4, 8)).values()
        for name in item
    ]
    assert {"dualpipe", "zb-h1-lazy", "auto"}.isdisjoint(result)
    assert {"1f1b", "zb-h1", "zb-v", "interleaved-1f1b"} <= set(result)
