"""Tests of what a user can see of a running pipeline: labels in the profiler, and the source of a NaN."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zbcompile
from tests.support.oracle import PROBLEMS, WIDTH
from tests.support.training import Case, pipeline_of
from zbcompile.schedules.ir.actions import COMMUNICATION, flatten
from zbcompile.schedules.ir.schedule import format_step, parse_step


def test_profiler_labels_are_those_of_torch() -> None:
    pipe = pipeline_of(Case("short-mlp", "zb-h1", 2, 4))
    batch = PROBLEMS["short-mlp"].batches(1, 8)[0]
    pipe.step(*batch.args, target=batch.target)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        pipe.step(*batch.args, target=batch.target)
    result = {event.key for event in seen.key_averages() if event.key.startswith("PP:")}
    steps = [step for order in pipe.program.schedule.orders for step in flatten(order)]
    expected = {f"PP:{format_step(step, 'torch')}" for step in steps}
    assert {"PP:0F3", "PP:1I2", "PP:0W0"} <= expected <= result
    rest = {parse_step(label.removeprefix("PP:"))[0] for label in result - expected}
    assert rest <= COMMUNICATION


class Masked(nn.Sequential):
    """A mask of -inf, which is meant, and a division that goes wrong for a row of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.abs().sum(1, keepdim=True)
        x = super().forward(x)
        x = F.softmax(x.masked_fill(x < 0, float("-inf")), 1)
        return x / size


def watched(kind: type[nn.Sequential]) -> tuple[Any, zbcompile.Pipeline, Tensor]:
    """A model, its pipeline after a step, and its batch."""
    torch.manual_seed(0)
    model, x = kind(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), torch.ones(8, WIDTH)
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4, "ranks": 2}
    pipe = zbcompile.pipeline(model, loss=F.mse_loss, debug_nan=True, **options)
    pipe.step(x, target=x)
    return model, pipe, x


def said_by(call: Callable[[], Any]) -> str:
    with pytest.raises(zbcompile.FaultError) as caught:
        call()
    return str(caught.value)


def test_the_source_of_a_nan() -> None:
    _, pipe, x = watched(Masked)
    bad = x.clone()
    bad[5] = 0
    for call, where in (
        (lambda: pipe.step(bad, target=x), "step 1"),
        (lambda: pipe.eval(bad), "eval"),
    ):
        text = said_by(call)
        first = "FloatingPointError: a NaN first appears in F of stage 1, in aten.div"
        assert f"rank 1 failed at F1.2 of {where}: {first}" in text
        assert "test_observe.py" in text
        assert "return x / size" in text


def test_a_nan_that_was_there_before_and_one_of_a_backward() -> None:
    """In the batch or in a parameter no operation makes it."""
    model, pipe, x = watched(nn.Sequential)
    bad = x.clone()
    bad[4, 3] = torch.nan
    first = r".*F of stage 0 receives a NaN in batch args\[0\]"
    assert re.search(r"F0\.2 of step 1: " + first, said_by(lambda: pipe.step(bad, target=x)))
    assert re.search(r"F0\.2 of eval: " + first, said_by(lambda: pipe.eval(bad)))
    text = said_by(lambda: pipe.step(x, target=bad))
    assert "F of stage 1 receives a NaN in batch target" in text
    text = said_by(lambda: pipe.step(x * 1e30, target=x * torch.inf))
    assert "FloatingPointError: a NaN first appears in BW of stage 1, in aten." in text
    with torch.no_grad():
        model[3].bias[0] = torch.nan
    text = said_by(lambda: pipe.step(x, target=x))
    assert "F of stage 1 receives a NaN in parameter 3.bias" in text
