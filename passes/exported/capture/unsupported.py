"""What an exported step cannot contain or reproduce, and the sentences that say so."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from zbcompile.passes.errors import CaptureError
from zbcompile.passes.exported.capture.known_values import LINE, users_line
from zbcompile.passes.exported.step_graph import tensors_of
from zbcompile.passes.exported.torch_private import DynamicOutputShapeException, annotations_of

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
        if func == _SET_DATA and args[0].requires_grad:
            raise CaptureError(WRITES_A_PARAMETER.format(line=users_line(sys._getframe(1))))
        description = INEXACT_FUNCTIONS.get(getattr(func, "__name__", ""))
        if description is not None:
            self.calls.append(f"{description} ({users_line(sys._getframe(1))})")
        return func(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

WRITES_A_PARAMETER = (
    "forward writes a parameter ({line}). A pipeline runs the forwards of later microbatches "
    "before the backward of this one, so they would read other values than in eager mode. Write it "
    "after the optimizer's step, or compute with a changed copy."
)
READS_A_VALUE = (
    "forward or the loss reads a value that depends on its inputs ({line}). A compiled step runs "
    "no Python, so it cannot decide by values. Compute with tensors instead (torch.where, masks), "
    'or name the input in static_inputs=("...",): then every value of it compiles a program.'
)
DRAWS_IN_BACKWARD = (
    "the backward draws random numbers ({operator}, of {line}): under a pipeline the backwards of "
    "microbatches run in another order than in eager mode. Draw the numbers in forward and save "
    "them."
)
UNNAMED_GROUP = "{operator} communicates over a {kind}; expected the name of a process group."
COMMUNICATES_IN_A_BRANCH = (
    "{operator} communicates inside of torch.cond: ranks that take another branch would not take "
    "part. Communicate before or after the branch."
)
LOSS_IS_NO_TENSOR = (
    "the loss is {kind}; expected a tensor with one element. Pass `loss=` as a function of "
    "(output, target), or return the loss from forward, alone or as `.loss`."
)
LOSS_HAS_A_SHAPE = (
    "the loss has shape {shape}; expected one element. Reduce it with `.mean()` or `.sum()`."
)
NOTHING_TO_TRAIN = (
    "the loss does not depend on a trained parameter: there is nothing to train. Check "
    "`requires_grad`, `detach()` and `torch.no_grad()` in forward and loss."
)
HOOK_NEVER_RUNS = (
    "{kind} on the parameter {name!r}: a pipeline adds gradients of microbatches without autograd, "
    "so the hook would never run. Use `parameter.register_hook(hook)`, which sees the gradient of "
    "each microbatch, or call the function after `pipe.step`."
)
WRITES_GRAD = (
    "the backward writes {name}.grad itself: the exported step contains only gradients that "
    "autograd returns. Return the gradient from `autograd.Function.backward` instead."
)
INEXACT = (
    "exact=True: {call} is traced as other operations than those that eager mode runs, so its last "
    "bits differ. Use exact=False, which allows it, or another layer."
)
HAS_A_DYNAMIC_SHAPE = (
    "the shape of a result depends on values of the inputs ({line}): nonzero, masked_select and "
    "x[mask] return as many elements as there are. Multiply by the mask, use ignore_index, or name "
    'the input in static_inputs=("...",): then every value of it compiles a program.'
)


def data_dependent_error(error: Exception) -> CaptureError:
    """Returns the refusal for an error of torch about values or shapes, with the user's line."""
    sizes = re.search(r"Size-like symbols: u\d", str(error))
    dynamic = sizes is not None or isinstance(error, DynamicOutputShapeException)
    message = HAS_A_DYNAMIC_SHAPE if dynamic else READS_A_VALUE
    return CaptureError(message.format(line=_line_of(error)))


def refuse_dynamic_shapes(nodes: Iterable[Node]) -> None:
    """Raises CaptureError if a tensor of the graph has a size that is not a number."""
    for node in nodes:
        for tensor in tensors_of(node):
            if any(not isinstance(size, int) for size in tensor.shape):
                line = annotations_of(node).get(LINE, "")
                raise CaptureError(HAS_A_DYNAMIC_SHAPE.format(line=line))


def _line_of(error: Exception) -> str:
    """Returns `file:line` of the innermost frame of the user's code in a traceback."""
    line, frame = "", error.__traceback__
    while frame is not None:
        name = frame.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if name not in ("torch", "zbcompile", "contextlib"):
            line = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return line


def refuse_inexact(calls: Sequence[str]) -> None:
    """Raises CaptureError if `exact=True` cannot hold."""
    if calls:
        raise CaptureError(INEXACT.format(call=calls[0]))
