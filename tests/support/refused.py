"""What must be refused: one clear error, in one process and on every rank, and no rank waits for
another."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import WIDTH
from tests.support.pool import Pool

ROWS = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)
PIPELINE, CAPTURE, PARTITION, SCHEDULE = (
    "PipelineError",
    "CaptureError",
    "PartitionError",
    "ScheduleError",
)


@dataclass(frozen=True)
class Refused:
    """`function` raises the class of that name; what it says matches `message`, over lines."""

    function: Callable[[], None]
    error: str
    message: str

    def __str__(self) -> str:
        return self.function.__name__

    def here(self) -> None:
        """Raised in this process, which runs both ranks."""
        with pytest.raises(Exception, match=f"(?s){self.message}") as caught:
            self.function()
        assert type(caught.value).__name__ == self.error

    def everywhere(self, pool: Pool) -> None:
        """Raised by each of two processes; a rank that waits for another one fails the test after a
        few seconds."""
        for outcome in pool.outcomes(self.function):
            assert outcome.error == self.error, outcome.trace
            assert re.search(f"(?s){self.message}", outcome.text), outcome.text


def train(
    model: nn.Module,
    x: Tensor = ROWS,
    schedule: Any = "1f1b",
    microbatches: int | None = 4,
    **options: Any,
) -> zbcompile.Pipeline:
    """Build a pipeline of two ranks and run a step."""
    options = {"loss": F.mse_loss, "ranks": 2} | options
    pipe = zbcompile.pipeline(model, schedule=schedule, microbatches=microbatches, **options)
    pipe.step(x, target=x)
    return pipe  # type: ignore[no-any-return]
