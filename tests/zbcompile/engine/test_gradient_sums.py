"""Gradients are added to what is there, inside tied and frozen parameters."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.oracle import PROBLEMS
from tests.support.training import AsEager


def compared(problem: str, schedule: str = "zb-h1") -> tuple[AsEager, partial[None]]:
    """A pipeline beside eager mode, and a step of both on the same batch."""
    chosen = PROBLEMS[problem]
    (batch,) = chosen.batches(1, 8)
    both = AsEager(chosen.model(), 4, chosen.loss, chosen.model(), schedule=schedule, ranks=2)
    return both, partial(both.step, *batch.args, target=batch.target)


@pytest.mark.parametrize("narrow", [False, True])
def test_steps_add_to_gradients_that_are_there(narrow: bool) -> None:
    """To those from before the first step, and without zero_grad to those of a step; with torch's
    `grad_dtype`, narrower than the parameters, every microbatch is rounded, and so is each sum."""
    both, step = compared("small-tied")
    for parameter in (*both.model.parameters(), *both.eager.parameters()):
        if narrow:
            parameter.grad_dtype = torch.bfloat16
        else:
            parameter.grad = torch.full_like(parameter, 0.25)
    step()
    step()


def test_freeze_between_steps() -> None:
    """Freezing layers after compiling, then thawing them, does what it does in eager mode."""
    both, step = compared("short-mlp", "zb-v")
    for frozen in (False, True, False):
        for model in (both.model, both.eager):
            model.layers[2].requires_grad_(not frozen)  # type: ignore[index,operator,union-attr]
            model.zero_grad()
        step()


def test_sum_instead_of_mean() -> None:
    """`loss_reduction="sum"`: neither the loss nor the gradients carry 1/m."""
    chosen = PROBLEMS["short-mlp"]
    model, (batch,) = chosen.model(), chosen.batches(1, 8)
    options = {"schedule": "zb-h1", "ranks": 2, "loss_reduction": "sum"}
    both = AsEager(model, 4, lambda y, goal: F.mse_loss(y, goal, reduction="sum"), **options)
    both.loss = lambda y, goal: F.mse_loss(y, goal, reduction="sum") * 4  # eager divides by 4
    both.step(*batch.args, target=batch.target)
