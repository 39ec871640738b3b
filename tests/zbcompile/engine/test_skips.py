"""Values that skip stages pass through the stages between: the bits of eager, and torch's
schedules."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zbcompile
from tests.support.oracle import Gradients
from tests.support.pool import Pool
from tests.support.skip_models import WIDTH, MaybeSkip, UNet
from tests.support.training import Case, assert_bitwise, assert_close, join, pipelined, reference

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


@pytest.mark.slow
def test_a_saved_program_evaluations_and_other_counts_agree(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = UNet(), torch.randn(8, WIDTH)
    loss = torch.nn.functional.mse_loss
    pipe = zbcompile.pipeline(
        model, schedule="zb-v", ranks=4, microbatches=4, loss=loss, exact=True
    )
    first = pipe.step(x, target=x)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(pipe.eval(x), model(x))
    pipe.program.save(tmp_path / "program")
    loaded = zbcompile.load(tmp_path / "program", model.state_dict())
    assert torch.equal(loaded.step(x, target=x), first)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name
    pipe.step(
        microbatches=[((part,), {}, part) for part in x[:6].split(2)]
    )  # three instead of four
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def step_of_two_shapes(schedule: str, first: int) -> tuple[Gradients, Gradients]:
    """The gradients of eager and of a step whose microbatches differ in shape and in whether a
    value skips."""
    torch.manual_seed(0)
    model, loss = MaybeSkip(), torch.nn.functional.mse_loss
    parts = [
        (torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)) for rows in (first, 5 - first) * 2
    ]
    for part, target in parts:
        (loss(model(part), target) / 4).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    count = None if dist.is_initialized() else 4
    pipe = zbcompile.pipeline(
        model, schedule=schedule, ranks=count, microbatches=4, loss=loss, exact=True
    )
    step = [((part,), {}, target) for part, target in parts]
    pipe.step(microbatches=step)
    return expected, {name: parameter.grad for name, parameter in pipe.named_parameters()}


TWO_SHAPES = [(schedule, first) for schedule in ("1f1b", "zb-v") for first in (2, 3)]


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(("schedule", "first"), TWO_SHAPES)
def test_microbatches_of_a_step_may_differ_in_what_skips(schedule: str, first: int) -> None:
    """Whichever the program is that gives the step its order."""
    assert_eager(*step_of_two_shapes(schedule, first))


def assert_eager(expected: Gradients, gradients: Gradients) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.slow
def test_messages_that_are_empty_in_some_microbatches_travel_between_processes(pool: Pool) -> None:
    for expected, gradients in pool.run(step_of_two_shapes, "zb-v", 3, ranks=4):
        own = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        assert own
        for name, gradient in own.items():
            assert torch.equal(gradient, expected[name]), name


def torch_stages() -> None:
    pipe = zbcompile.pipeline(
        UNet(), schedule="1f1b", loss=torch.nn.functional.mse_loss, microbatches=4
    )
    x: Tensor = torch.ones(4, WIDTH)
    pipe.compile(x, target=x)
    pipe.stages()


@pytest.mark.slow
def test_torchs_schedules_run_them(pool: Pool) -> None:
    pool.run(torch_stages, ranks=2)
