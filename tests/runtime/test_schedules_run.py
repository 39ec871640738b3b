"""Every schedule executes, with eager's bits in the order in which it declares to accumulate weight gradients."""

import pytest
import torch

from tests.oracle import PROBLEMS, eager_step_in_order
from tests.runtime.pool import Pool
from tests.runtime.training import (
    ROWS,
    Case,
    Trained,
    assert_bitwise,
    assert_same_tensors,
    gradients_of,
    join,
    pipeline_of,
    pipelined,
    reference,
)
from zbcompile.schedules import build, names, smallest_microbatches

RANKS = 2
NAMES = [name for name in names() if name != "dualpipe"]  # two model copies: refused, see test_bad_input.py
LAZY = [name for name in NAMES if name == "zb-h1-lazy"]


def cases(problem: str) -> list[Case]:
    return [Case(problem, name, RANKS, smallest_microbatches(name, RANKS, at_least=6), steps=1) for name in NAMES]


@pytest.mark.parametrize("case", cases("small-dropout"), ids=lambda case: case.schedule)
def test_dropout_is_that_of_a_seeded_eager_run(case: Case) -> None:
    """Bitwise: the generator's state travels with the activations, whatever the order of the actions."""
    ours = pipelined(case)
    assert_same_tensors(ours.losses, reference(case).losses, "loss of step")
    if case.schedule in LAZY:
        assert_same_tensors(ours.gradients[0], folded(case).gradients[0], "gradient of")
    else:
        assert_bitwise(ours, reference(case))


def folded(case: Case) -> Trained:
    """Eager's per-microbatch gradients added in the schedule's own order of each stage."""
    program = pipeline_with_program(case)
    problem = PROBLEMS[case.problem]
    model, batch = problem.model(), problem.batches(1, case.microbatches * ROWS)[0]
    stages = {name: program.homes[name][0] for name, _ in model.named_parameters()}
    orders = {name: program.schedule.weight_order(stage) for name, stage in stages.items()}
    loss = eager_step_in_order(model, problem.loss, batch, 0, orders)
    return Trained([loss], [gradients_of(model)], {})


def pipeline_with_program(case: Case):
    pipe = pipeline_of(case)
    batch = PROBLEMS[case.problem].batches(1, case.microbatches * ROWS)[0]
    return pipe.compile(*batch.args, target=batch.target).program


def test_only_the_lazy_schedule_declares_another_order() -> None:
    """The others accumulate in microbatch order on every stage, so they equal eager accumulation itself."""
    for case in cases("mlp"):
        schedule = build(case.schedule, case.ranks, case.microbatches)
        orders = {schedule.weight_order(stage) for stage in range(schedule.stages)}
        assert (orders == {tuple(range(case.microbatches))}) == (case.schedule not in LAZY), case.schedule


@pytest.mark.parametrize("case", cases("mlp"), ids=lambda case: case.schedule)
def test_in_processes(case: Case, pool: Pool) -> None:
    """The order that runs in one process runs over messages, with the same bits."""
    ours = join(pool.run(pipelined, case, ranks=case.ranks))
    if case.schedule in LAZY:
        assert_same_tensors(ours.gradients[0], folded(case).gradients[0], "gradient of")
    else:
        assert_bitwise(ours, reference(case))


@pytest.mark.parametrize(
    "case", [Case("gpt-dropout", "zb-v", 2, 4, exact=False), Case("gpt-dropout", "1f1b", 4, 4)], ids=str
)
def test_dropout_over_messages(case: Case, pool: Pool) -> None:
    """The generator's state crosses processes; the caller's own generator is left as it was."""
    alone = pipelined(case)
    assert_bitwise(join(pool.run(pipelined, case, ranks=case.ranks)), alone)
    if case.exact:
        assert_bitwise(alone, reference(case))


def generator_before_and_after(case: Case) -> bool:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    pipelined(case)
    return torch.equal(before, torch.get_rng_state())


def test_callers_generator_is_left_alone(pool: Pool) -> None:
    case = Case("small-dropout", "zb-h1", 2, 2, steps=1)
    assert generator_before_and_after(case)
    assert pool.run(generator_before_and_after, case) == [True, True]
