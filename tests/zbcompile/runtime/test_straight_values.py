"""Values that go straight to the stages that read them: the bits of eager, fewer bytes, and torch's schedules."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zbcompile
from tests.support.oracle import Gradients
from tests.support.pool import Pool
from tests.support.skip_models import WIDTH, EncoderDecoder, Masked, MaybeSkip, Residuals, UNet
from tests.support.training import Case, assert_bitwise, assert_close, join, pipelined, reference
from zbcompile.batches.example import Example
from zbcompile.compiler.compile_example import compile_example
from zbcompile.compiler.paired_schedule import in_order
from zbcompile.errors import PipelineError
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.partition import stage_graphs
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.prediction.predict import count_messages
from zbcompile.program.program import Program
from zbcompile.runtime.rank_plan import instructions_of
from zbcompile.schedules import build, check, lower
from zbcompile.schedules.ir import kinds

EXACT = (
    Case("masked", "zb-v", 4, 5),
    Case("u-net", "1f1b", 4, 5),
    Case("u-net", "zb-v", 4, 5),
    Case("u-net", "interleaved-1f1b", 4, 4),
    Case("u-net", "dualpipe", 4, 8),
    Case("encoder-decoder", "zb-v", 4, 5),
    Case("encoder-decoder", "interleaved-1f1b", 2, 4),
    Case("residuals", "1f1b", 4, 5),
    Case("residuals", "zb-v", 4, 5),
    Case("residuals", "interleaved-1f1b", 4, 4),
    Case("residuals", "zb-v", 2, 4),
    Case("masked", "1f1b", 4, 6),
    Case("masked", "dualpipe", 4, 8),
    Case("masked", "interleaved-1f1b", 2, 4),
)


@pytest.mark.mostly_slow(every=24, suite=6)
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_gradients_have_the_bits_of_eager(case: Case, pool: Pool) -> None:
    """In one process, and the same bits in a process for each rank."""
    alone = pool.alone(pipelined, case)
    assert_bitwise(alone, reference(case))
    assert_bitwise(join(pool.run(pipelined, case, ranks=case.ranks)), alone)


DEFAULT = (
    Case("residuals", "zb-v", 4, 5, exact=False, steps=1),
    Case("residuals", "interleaved-1f1b", 4, 4, exact=False, steps=1),
    Case("encoder-decoder", "interleaved-1f1b", 4, 4, exact=False, steps=1),
)


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_what_a_rank_keeps_changes_no_more_than_rounding(case: Case, pool: Pool) -> None:
    alone = pool.alone(pipelined, case)
    assert_close(alone, reference(case))
    assert_bitwise(join(pool.run(pipelined, case, ranks=case.ranks)), alone)


class Arriving(NamedTuple):
    """A stage that is not bound to tensors, as what receives."""

    program: StageProgram
    device: torch.device = torch.device("cpu")
    generator_arrives: bool = False


def compiled(model: torch.nn.Module, schedule: str, choices: Choices, ranks: int = 4) -> Program:
    x = torch.ones(2, WIDTH)
    order = build(schedule, ranks=ranks, microbatches=2 * ranks)
    return compile_example(Example(model, (x,), target=x, loss=torch.nn.functional.mse_loss), order, choices).program


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_a_u_net_sends_each_value_once(schedule: str) -> None:
    """Straight, there and back: of no value does a rank get more than one copy."""
    straight, relay = (compiled(UNet(), schedule, Choices(relay=relay)) for relay in (False, True))
    check(straight.lowered)
    assert straight.schedule.ways
    assert not relay.schedule.ways
    assert count_messages(straight).bytes < 0.8 * count_messages(relay).bytes


@pytest.mark.slow
def test_what_a_rank_has_is_not_sent_to_it() -> None:
    """Of four ranks with two stages each three get every value, and return one gradient."""
    program = compiled(Residuals(), "interleaved-1f1b", Choices())
    names = {name.partition("__to")[0] for stage in program.stages for name in stage.receives}
    for name in names:
        sends = [(s, spec) for s in program.stages for n, spec in s.sends.items() if n.partition("__to")[0] == name]
        ranks = [program.rank_of(s.stage + spec.hops) for s, spec in sends]
        crossing = [there for (s, _), there in zip(sends, ranks, strict=True) if there != program.rank_of(s.stage)]
        assert len(crossing) == len(set(crossing)), name


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize("exact", [True, False])
def test_a_mask_goes_straight_and_its_send_is_over_when_a_gradient_is_back(exact: bool) -> None:
    """No gradient comes from where it went: the one of the next stage tells."""
    straight, relay = (compiled(Masked(), "1f1b", Choices(exact=exact, relay=relay)) for relay in (False, True))
    check(straight.lowered)
    assert any(not way.back for way in straight.schedule.ways)
    assert count_messages(straight).bytes < count_messages(relay).bytes
    stages = [Arriving(each) for each in straight.stages]
    instructions = [each for step in instructions_of(straight, 0, lambda action: stages[action.stage]) for each in step]
    over = [message for each in instructions for message in each.completes]
    assert len(over) == len(set(over))
    assert {message.microbatch for message in over if message.hops > 1} == set(range(straight.schedule.microbatches))


@pytest.mark.slow
def test_two_readers_of_a_stage_keep_the_relay_if_bits_count() -> None:
    """A maker that added the sum of two gradients to that of a later stage would add in another order than eager."""
    model = EncoderDecoder()
    exact, default = (compiled(model, "interleaved-1f1b", Choices(exact=exact)) for exact in (True, False))
    assert count_messages(default).bytes < count_messages(exact).bytes


@pytest.mark.slow
def test_a_saved_program_evaluations_and_other_counts_go_the_same_ways(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = UNet(), torch.randn(8, WIDTH)
    loss = torch.nn.functional.mse_loss
    pipe = zbcompile.pipeline(model, schedule="zb-v", ranks=4, microbatches=4, loss=loss, exact=True)
    first = pipe.step(x, target=x)
    assert pipe.program.schedule.ways
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(pipe.eval(x), model(x))
    pipe.program.save(tmp_path / "program")
    loaded = zbcompile.load(tmp_path / "program", model.state_dict())
    assert torch.equal(loaded.step(x, target=x), first)
    assert loaded.program.schedule.ways == pipe.program.schedule.ways
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name
    pipe.step(microbatches=[((part,), {}, part) for part in x[:6].split(2)])  # three instead of four
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def step_of_two_answers(schedule: str, first: int, folder: Path | None = None) -> tuple[Gradients, Gradients]:
    """The gradients of eager and of a step whose microbatches differ in whether a value skips; of the program as it
    is read from `folder`, if that is given."""
    torch.manual_seed(0)
    model, loss = MaybeSkip(), torch.nn.functional.mse_loss
    parts = [sign * (torch.rand(2, WIDTH) + 0.1) for sign in (first, -first, first, -first)]
    x, y = torch.cat(parts), torch.randn(8, WIDTH)
    for part, target in zip(parts, y.split(2), strict=True):
        (loss(model(part), target) / 4).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    count = None if dist.is_initialized() else 4
    pipe = zbcompile.pipeline(model, schedule=schedule, ranks=count, microbatches=4, loss=loss, exact=True)
    pipe.step(x, target=y)
    assert {len(each.graphs[0].program.schedule.ways) for each in pipe._compiled.cache.steps} == {0, 1}
    if folder is not None:
        pipe.program.save(folder)
        pipe = zbcompile.load(folder, model.state_dict())
        pipe.step(x, target=y)
    return expected, {name: parameter.grad for name, parameter in pipe.named_parameters()}


TWO_ANSWERS = [(schedule, first) for schedule in ("1f1b", "zb-v") for first in (1, -1)]


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(("schedule", "first"), TWO_ANSWERS)
def test_microbatches_of_a_step_may_differ_in_their_ways(schedule: str, first: int) -> None:
    """Whichever the program is that gives the step its order."""
    assert_eager(*step_of_two_answers(schedule, first))


@pytest.mark.slow
def test_saved_steps_for_other_answers_may_differ_in_their_ways(tmp_path: Path) -> None:
    assert_eager(*step_of_two_answers("zb-v", 1, tmp_path / "program"))


def assert_eager(expected: Gradients, gradients: Gradients) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.slow
def test_messages_that_are_empty_in_some_microbatches_travel_between_processes(pool: Pool) -> None:
    for expected, gradients in pool.run(step_of_two_answers, "zb-v", -1, ranks=4):
        own = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        assert own
        for name, gradient in own.items():
            assert torch.equal(gradient, expected[name]), name


def test_an_order_without_the_ways_of_a_program_is_refused() -> None:
    """Its messages to the next stage would carry what is for others."""
    program = compiled(UNet(), "zb-v", Choices())
    with pytest.raises(PipelineError, match="along 1<>7, 2<>6, for which"):
        replace(program, lowered=lower(build("zb-v", ranks=4, microbatches=8)))
    order = build("zb-v", ranks=4, microbatches=12)
    assert in_order(program, order).schedule.ways == program.schedule.ways


def test_no_value_goes_further_than_a_message() -> None:
    assert stage_graphs.FARTHEST == kinds.FARTHEST


def torch_stages(relay: bool) -> None:
    pipe = zbcompile.pipeline(UNet(), schedule="1f1b", loss=torch.nn.functional.mse_loss, microbatches=4, relay=relay)
    x: Tensor = torch.ones(4, WIDTH)
    pipe.compile(x, target=x)
    pipe.stages()


@pytest.mark.slow
def test_torchs_schedules_need_the_relay(pool: Pool) -> None:
    pool.run(torch_stages, True, ranks=2)
    with pytest.raises(Exception, match="relay=True"):
        pool.run(torch_stages, False, ranks=4)


@pytest.mark.slow
def test_a_schedule_with_the_messages_of_another_model_is_refused() -> None:
    program = compiled(UNet(), "1f1b", Choices())
    x = torch.ones(2, WIDTH)
    example = Example(Residuals(), (x,), target=x, loss=torch.nn.functional.mse_loss)
    with pytest.raises(Exception, match="not those of this model"):
        compile_example(example, program.lowered.as_schedule(), Choices())
    again = compile_example(
        Example(UNet(), (x,), target=x, loss=torch.nn.functional.mse_loss), program.lowered.as_schedule(), Choices()
    )
    assert again.program.lowered == program.lowered
