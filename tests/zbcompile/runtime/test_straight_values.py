"""Values that go straight to the stages that read them: the bits of eager, fewer bytes, and torch's schedules."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import zbcompile
from tests.support.pool import Pool
from tests.support.skip_models import WIDTH, EncoderDecoder, Residuals, UNet
from tests.support.training import Case, assert_bitwise, assert_close, join, pipelined, reference
from zbcompile.batches.example import Example
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.partition import straight_ways
from zbcompile.prediction.predict import count_messages
from zbcompile.program.program import Program
from zbcompile.schedules import build, check
from zbcompile.schedules.ir import kinds

EXACT = (
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
)


@pytest.mark.mostly_slow(every=4)
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


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_what_a_rank_keeps_changes_no_more_than_rounding(case: Case, pool: Pool) -> None:
    alone = pool.alone(pipelined, case)
    assert_close(alone, reference(case))
    assert_bitwise(join(pool.run(pipelined, case, ranks=case.ranks)), alone)


def compiled(model: torch.nn.Module, schedule: str, choices: Choices, ranks: int = 4) -> Program:
    x = torch.ones(2, WIDTH)
    order = build(schedule, ranks=ranks, microbatches=2 * ranks)
    return compile_example(Example(model, (x,), target=x, loss=torch.nn.functional.mse_loss), order, choices).program


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_a_u_net_sends_each_value_once(schedule: str) -> None:
    """Straight, there and back: of no value does a rank get more than one copy."""
    straight, relay = (compiled(UNet(), schedule, Choices(relay=relay)) for relay in (False, True))
    check(straight.lowered)
    assert straight.schedule.ways
    assert not relay.schedule.ways
    assert count_messages(straight).bytes < 0.8 * count_messages(relay).bytes


def test_what_a_rank_has_is_not_sent_to_it() -> None:
    """Of four ranks with two stages each three get every value, and return one gradient."""
    program = compiled(Residuals(), "interleaved-1f1b", Choices())
    names = {name.partition("__to")[0] for stage in program.stages for name in stage.receives}
    for name in names:
        sends = [(s, spec) for s in program.stages for n, spec in s.sends.items() if n.partition("__to")[0] == name]
        ranks = [program.rank_of(s.stage + spec.hops) for s, spec in sends]
        crossing = [there for (s, _), there in zip(sends, ranks, strict=True) if there != program.rank_of(s.stage)]
        assert len(crossing) == len(set(crossing)), name


def test_two_readers_of_a_stage_keep_the_relay_if_bits_count() -> None:
    """A maker that added the sum of two gradients to that of a later stage would add in another order than eager."""
    model = EncoderDecoder()
    exact, default = (compiled(model, "interleaved-1f1b", Choices(exact=exact)) for exact in (True, False))
    assert count_messages(default).bytes < count_messages(exact).bytes


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


def test_no_value_goes_further_than_a_message() -> None:
    assert straight_ways.FARTHEST == kinds.FARTHEST


def torch_stages(relay: bool) -> None:
    pipe = zbcompile.pipeline(UNet(), schedule="1f1b", loss=torch.nn.functional.mse_loss, microbatches=4, relay=relay)
    x: Tensor = torch.ones(4, WIDTH)
    pipe.compile(x, target=x)
    pipe.stages()


def test_torchs_schedules_need_the_relay(pool: Pool) -> None:
    pool.run(torch_stages, True, ranks=2)
    with pytest.raises(Exception, match="relay=True"):
        pool.run(torch_stages, False, ranks=4)


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
