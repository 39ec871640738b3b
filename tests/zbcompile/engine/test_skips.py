"""Values that skip stages pass through the stages between, also in saved programs, in microbatches
of different shapes and under torch's schedules."""

import pytest
import torch
import torch.distributed as dist

import zbcompile
from tests.support.oracle import Gradients
from tests.support.skip_models import WIDTH, MaybeSkip


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
    """The order of the step may be that of either program."""
    assert_eager(*step_of_two_shapes(schedule, first))


def assert_eager(expected: Gradients, gradients: Gradients) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
