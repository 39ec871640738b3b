"""What must be refused: one clear error, in one process and on every rank, and no rank waits for
another."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP, WIDTH

ROWS = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)
Call = Callable[[], object]
Refused = tuple[str, str, Call]  # the class, what its message matches, the call


def said(call: Call) -> tuple[str, str]:
    """The class of what `call` raises, and its message; empty if it raises nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def refusals(
    pipeline: dict[str, Call],
    capture: dict[str, Call],
    partition: dict[str, Call],
    schedule: dict[str, Call],
) -> tuple[Refused, ...]:
    """Calls by what their messages match, for each class of errors."""
    errors = ("PipelineError", "CaptureError", "PartitionError", "ScheduleError")
    pairs = zip(errors, (pipeline, capture, partition, schedule), strict=True)
    return tuple((error, *item) for error, calls in pairs for item in calls.items())


def assert_refused(result: tuple[str, str], refused: Refused) -> None:
    error, message, _ = refused
    assert result[0] == error, result[1]
    assert re.search(f"(?s){message}", result[1]), result[1]


def train(
    model: Any = None, x: Tensor = ROWS, target: Any = None, **options: Any
) -> zbcompile.Pipeline:
    """Build a pipeline of two ranks and run a step; `target` is x where none is given."""
    pipe = pipeline_of(MLP(2) if model is None else model, **options)
    pipe.step(x, target=x if target is None else target)
    return pipe


def pipeline_of(model: nn.Module, **options: Any) -> zbcompile.Pipeline:
    usual = {"schedule": "1f1b", "microbatches": 4, "ranks": 2, "loss": F.mse_loss}
    return zbcompile.pipeline(model, **{**usual, **options})  # type: ignore[no-any-return]
