"""What an exported step cannot reproduce: operations whose bits differ from eager mode.

Refusals of models that cannot be exported at all are raised where they are found.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from zbcompile.passes.errors import CaptureError
from zbcompile.passes.exported.capture.known_values import users_line

# Functions of torch whose trace computes other bits than their kernel: composite recurrences, and
# a draw in place whose numbers depend on the input.
INEXACT_FUNCTIONS: Mapping[str, str] = {
    "lstm": "an LSTM",
    "lstm_cell": "an LSTM cell",
    "gru": "a GRU",
    "gru_cell": "a GRU cell",
    "rrelu": "RReLU",
    "rrelu_": "RReLU",
}


class InexactCalls(TorchFunctionMode):
    """A function mode that notes calls whose bits differ from eager mode, with the user's line."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        description = INEXACT_FUNCTIONS.get(getattr(func, "__name__", ""))
        if description is not None:
            self.calls.append(f"{description} ({users_line(sys._getframe(1))})")
        return func(*args, **(kwargs or {}))


def refuse_inexact(calls: Sequence[str]) -> None:
    """Raises CaptureError if `exact=True` cannot hold."""
    if calls:
        raise CaptureError(
            f"exact=True: {calls[0]} is traced as other operations than those that eager mode "
            "runs, so its last bits differ. Use exact=False, which allows it, or another layer."
        )
