"""Refusals: calls that a trace cannot reproduce, and what errors of torch mean for the user."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from zbcompile.passes.capture.autocast_casts import AutocastRegions
from zbcompile.passes.capture.unsupported import (
    FAILS,
    HAS_A_DYNAMIC_SHAPE,
    INEXACT,
    READS_A_TENSOR_ATTRIBUTE,
    READS_A_VALUE,
    READS_PARAMETER_STATE,
    SETS_DATA,
    at,
    static,
)
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import tensors_of
from zbcompile.passes.graph.row_exchanges import RoutedExchanges, require_fit
from zbcompile.passes.graph.source_location import (
    is_called_by_user,
    is_users_frame,
    line_of,
    users_line,
)
from zbcompile.passes.torch_private import (
    DATA_DEPENDENT_ERRORS,
    READ_SCALAR,
    READ_VERSION,
    DynamicOutputShapeException,
    storage_key,
)

aten = torch.ops.aten

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


@dataclass
class Questions:
    """Inputs whose values a trace needed and did not have.

    Attributes:
        value: The batch inputs on which the last value depends that Python read.
        shape: Those on which the first shape depends that no trace knows.
        shape_line: The user's line of this shape; "" if there is none.
    """

    value: frozenset[str] = frozenset()
    shape: frozenset[str] = frozenset()
    shape_line: str = ""


class InexactCalls(TorchFunctionMode):
    """A function mode that notes a sentence for every call whose bits differ from eager mode.

    It refuses what a graph cannot say about the traced `parameters`, collects the values of
    `require_fit`, reads the numbers of a list that torch.tensor takes, exchanges rows whose counts
    a router decides, and annotates what runs in autocast `regions`.
    """

    def __init__(
        self,
        routed: RoutedExchanges,
        numbers_of: Callable[[Any], tuple[Any, torch.dtype]],
        parameters: Iterable[torch.Tensor],
        regions: AutocastRegions,
    ) -> None:
        super().__init__()
        self.routed, self.regions = routed, regions
        self._numbers_of = numbers_of
        self.calls: list[str] = []
        self._parameters = {id(parameter) for parameter in parameters}
        self.fits: list[Tensor] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.regions.annotate(func)
        result = self.routed.result(func, args, kwargs or {})
        if result is not NotImplemented:
            return result
        if func is require_fit:
            self.fits.append(args[0].detach())
            return None
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            _refuse_assigned_data(args[0], args[1], users_line(sys._getframe(1)))
        attribute = _PARAMETER_STATE.get(func)
        is_state = attribute is not None and id(args[0]) in self._parameters
        # torch itself reads `.grad` in Module.to
        if is_state and (attribute == _TRAINS or is_called_by_user(sys._getframe(1))):
            line = users_line(sys._getframe(1))
            raise CaptureError(READS_PARAMETER_STATE.format(attribute=attribute, line=line))
        if func is torch.tensor and args and _is_list_of_tensors(args[0]):
            numbers, dtype = self._numbers_of(args[0])
            kwargs = dict(kwargs or {})
            args, kwargs["dtype"] = (numbers,), kwargs.get("dtype") or dtype
        description = INEXACT_FUNCTIONS.get(getattr(func, "__name__", ""))
        if description is not None:
            call = f"{description} ({users_line(sys._getframe(1))})"
            self.calls.append(INEXACT.format(call=call))
        return func(*args, **(kwargs or {}))


_TRAINS = "`requires_grad`"
_PARAMETER_STATE = {
    torch.Tensor.requires_grad_: _TRAINS,
    torch.Tensor.requires_grad.__set__: _TRAINS,  # type: ignore[attr-defined]
    torch.Tensor.grad.__get__: "`.grad`",  # type: ignore[attr-defined, union-attr]
    torch.Tensor.grad.__set__: "`.grad`",  # type: ignore[attr-defined, union-attr]
    READ_VERSION: "the version",
}


def _refuse_assigned_data(tensor: Tensor, value: Tensor, line: str) -> None:
    """Raises CaptureError for `tensor.data = value`, unless it is a conversion that changes
    nothing, as of Module.to."""
    forms = [(x.dtype, x.shape, x.stride(), storage_key(x)) for x in (tensor, value)]
    if forms[0] != forms[1]:
        raise CaptureError(SETS_DATA.format(line=line))


def unseen_attribute(name: str) -> property:
    """Returns an attribute of tensors that raises CaptureError if it is read."""

    def read(tensor: Tensor) -> Any:
        line = users_line(sys._getframe(1))
        raise CaptureError(READS_A_TENSOR_ATTRIBUTE.format(name=name, line=line))

    return property(read)


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(tensors_of(value))


_PLAIN_TENSOR = (
    "A tensor that belongs to no module is changed in place: register it with register_buffer, "
    "and change it in forward."
)

_FUNC = "Write the transform of torch.func out as ordinary operations."

# Words in errors of torch, and what to do about them.
_ADVICE = {
    "no fake impl": "Register one with torch.library.register_fake.",
    "does not have a registered fake impl": "Register one with torch.library.register_fake.",
    "no autograd formula": "Register one with torch.library.register_autograd, or detach its "
    "input if no gradient should flow.",
    "mirrored meta": "A Function that calls autograd in its backward, for parameters that are not "
    "its arguments, writes their `.grad` itself: pass them as arguments, and return their "
    "gradients.",
    "entirely functional graph": _PLAIN_TENSOR,
    "mutating a non-functional tensor": _PLAIN_TENSOR,
    "numpy() is not supported": "Compute with torch, or write a torch.library.custom_op.",
    "concrete integers": "A size depends on values of the inputs. Pass it as a Python "
    "number{static}.",
    "aliasing": "Return new tensors from the branches of torch.cond: `.clone()`.",
    "its data is not allocated yet": "A kernel reads values in Python, or runs outside of the "
    "dispatcher. F.ctc_loss: pass the lengths as tensors. Kernels of your own: wrap them "
    "with torch.library.custom_op.",
    "functorch": _FUNC,
    "sources must not be empty for symbol": _FUNC,  # of a forward derivative
    "FlexAttention does not support backward on CPU": "Train on a GPU, or call "
    "F.scaled_dot_product_attention with a mask.",
}


def refusal_of(error: Exception, call: str, questions: Questions) -> CaptureError:
    """Returns the refusal for an error that torch or the model raises during a trace.

    Args:
        call: What was running, and what it received.
        questions: The values that the trace asked for.
    """
    if isinstance(error, DATA_DEPENDENT_ERRORS):
        is_size = re.search(r"Size-like symbols: u\d", str(error)) is not None
        if is_size or isinstance(error, DynamicOutputShapeException):
            return _dynamic_shape(questions.shape_line or _line_of(error), questions)
        return _value_read(_line_of(error), questions)
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    advice = next((advice for sign, advice in _ADVICE.items() if sign in str(error)), "")
    kind = type(error).__name__
    return CaptureError(
        FAILS.format(
            call=call,
            at=at(_line_of(error)),
            kind=kind,
            error=text,
            advice=f" {advice.format(static=static(questions.value))}" * bool(advice),
        )
    )


def refuse_open_values(nodes: Iterable[Node], questions: Questions) -> None:
    """Raises CaptureError if the graph computes with a number that it reads from a tensor, or with
    a tensor whose size is no number."""
    for node in nodes:
        if has_dynamic_shape(node.meta.get("val")):
            raise _dynamic_shape(line_of(node), questions)
        if node.target is READ_SCALAR:
            raise _value_read(line_of(node), questions)


def _dynamic_shape(line: str, questions: Questions) -> CaptureError:
    return CaptureError(HAS_A_DYNAMIC_SHAPE.format(at=at(line), static=static(questions.shape)))


def _value_read(line: str, questions: Questions) -> CaptureError:
    return CaptureError(READS_A_VALUE.format(at=at(line), static=static(questions.value)))


def has_dynamic_shape(value: Any) -> bool:
    """Returns True if a tensor in `value` has a size that is not a number."""
    return any(not isinstance(size, int) for tensor in tensors_of(value) for size in tensor.shape)


def _line_of(error: Exception) -> str:
    """Returns `file:line` of the innermost frame of the user's code in a traceback."""
    line, frame = "", error.__traceback__
    while frame is not None:
        if is_users_frame(frame.tb_frame):
            line = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return line
