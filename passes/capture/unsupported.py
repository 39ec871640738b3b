"""What an exported step cannot contain or reproduce, and the sentences that say so."""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from zbcompile.passes.capture.expert_capacity import require_fit
from zbcompile.passes.capture.source_lines import LINE, is_users_frame, users_line
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.gpu_kernels import kernel_of
from zbcompile.passes.graph.row_exchanges import RoutedExchanges
from zbcompile.passes.torch_private_capture import (
    DATA_DEPENDENT_ERRORS,
    READ_SCALAR,
    READ_VERSION,
    DynamicOutputShapeException,
    annotations_of,
    pytree,
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


NO_INPUT = ""  # among the inputs that a value depends on: parameters, buffers, random numbers


@dataclass
class Questions:
    """What a trace asked about values that it does not know.

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
    a router decides, and on a device that is not there calls the device's kernels.
    """

    def __init__(
        self,
        routed: RoutedExchanges,
        numbers_of: Callable[[Any], tuple[Any, torch.dtype]],
        parameters: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self.routed = routed
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
        result = self.routed.result(func, args, kwargs or {})
        if result is not NotImplemented:
            return result
        if func is require_fit:
            self.fits.append(args[0].detach())
            return None
        if func == _SET_DATA:
            if _is_same_memory(*args):  # a conversion that changes nothing, as of Module.to
                return None
            raise CaptureError(SETS_DATA.format(line=users_line(sys._getframe(1))))
        if func in _SETS_REQUIRES_GRAD and id(args[0]) in self._parameters:
            raise CaptureError(SETS_REQUIRES_GRAD.format(line=users_line(sys._getframe(1))))
        attribute = _PARAMETER_STATE.get(func)
        if attribute and id(args[0]) in self._parameters and _is_read_by_user():
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
        return kernel_of(func, tuple(args))(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SETS_REQUIRES_GRAD = (
    torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
)
_PARAMETER_STATE = {
    torch.Tensor.grad.__get__: "`.grad`",  # type: ignore[attr-defined, union-attr]
    torch.Tensor.grad.__set__: "`.grad`",  # type: ignore[attr-defined, union-attr]
    READ_VERSION: "the version",
}


def refuse_assigned_data() -> None:
    """Raises CaptureError if the caller's caller, which assigns to `.data`, is the user's code.

    Function modes are off in a backward.
    """
    frame = sys._getframe(2)
    if is_users_frame(frame):
        raise CaptureError(SETS_DATA.format(line=users_line(frame)))


def _is_list_of_tensors(value: Any) -> bool:
    leaves = pytree.tree_leaves(value) if isinstance(value, list | tuple) else []
    return any(isinstance(leaf, Tensor) for leaf in leaves)


def _is_same_memory(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    same_type = (tensor.dtype, tensor.shape, tensor.stride()) == (
        value.dtype,
        value.shape,
        value.stride(),
    )
    return same_type and storage_key(tensor) == storage_key(value)


def _is_read_by_user() -> bool:
    """Returns True if the user's code reads an attribute; torch reads `.grad` in Module.to."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and is_users_frame(frame)


WRITES_A_PARAMETER = (
    "forward writes a parameter ({line}). A pipeline runs the forwards of later microbatches "
    "before the backward of this one, so they would read other values than in eager mode. Write it "
    "after the optimizer's step, or compute with a changed copy."
)
NO_METRICS = (
    "return_metrics=True, but {missing}. Pass loss=fn(output, target) that returns (loss, "
    "metrics), or leave out return_metrics."
)
IS_A_WRAPPER = "{module} is a {kind}, which cannot be captured. {remedy}"
HAS_GLOBAL_HOOKS = (
    "{hooks} for all modules are registered; a compiled stage never calls a module, so they would "
    "be silently lost. Register hooks on the modules themselves, and remove these."
)
FUNCTION_MODE_IS_ON = (
    "the torch function mode {mode} is on; a compiled stage calls none of torch's functions, so "
    "the mode would be silently lost. Leave it before the step, or enter it in forward."
)
IS_LAZY = (
    "{module} is lazy and has no shapes yet. Call the model once with a batch before compiling, or "
    "give the layer its sizes."
)
MOMENTUM_IS_NONE = (
    "{module} has momentum=None: it divides by the number of batches so far, which it reads out of "
    "a tensor in every forward. Give it a momentum, such as 0.1."
)
SHARES_MEMORY = (
    "the {kind} {first!r} and {second!r} are different tensors over the same memory; on different "
    "ranks they would drift apart. Assign one tensor to both, or clone one of them."
)
INSIDE_CONTEXT_PARALLEL = (
    "inside torch's context_parallel(), attention takes DTensors and the batch is sharded in "
    'place. Compile and step outside of it, with "cp" in mesh= and the exchange of keys and '
    "values written in the model (functional collectives)."
)
READS_A_TRAINED_TENSOR = (
    "forward or the loss reads a tensor that requires a gradient, but is no parameter of the model "
    "({line}): its gradient would be lost. Register it as a parameter of the model or of a loss "
    "module, or detach it."
)
READS_PARAMETER_STATE = (
    "forward reads or sets {attribute} of a parameter ({line}), which another microbatch may have "
    "changed; a graph has none. Pass what it needs as an input."
)
SETS_REQUIRES_GRAD = (
    "forward changes requires_grad of a parameter ({line}). Which parameters train must be settled "
    "before the step."
)
CHANGES_HOOKS = (
    "forward changes {path}: in eager mode every microbatch would run with others. Register hooks "
    "outside of forward, or at its first call alone."
)
REPLACES_A_BUFFER = (
    "forward replaces the buffer {name} ({before}) by {now}, and a graph needs its shape and dtype "
    "to stay. If only the first call does, call the model once before compiling."
)
SETS_DATA = (
    "forward assigns to the `.data` of a tensor ({line}), which a graph cannot do. Compute a new "
    "tensor, or change a buffer in place under torch.no_grad() (`buffer.copy_(value)`). Write a "
    "parameter after the optimizer's step."
)
UNKNOWN_INPUT = (
    "the batch contains a {kind} ({path}), whose tensors or values a step could not tell from "
    "constants. Pass tensors, numbers, strings, None, and containers of these. Register a "
    "dataclass with torch.export.register_dataclass."
)
WRITES_AN_INPUT = (
    "forward or the loss changes {path} of the batch in place ({line}), and with it the user's "
    "tensor. Work on a copy: `.clone()`."
)
WRITES_A_PLAIN_TENSOR = (
    "forward changes {path} in place ({line}), a tensor that is not registered with a module. "
    "Register it with `register_buffer`."
)
WRITES_A_BUFFER_IN_BACKWARD = (
    "the backward changes the buffer {name!r}. A pipeline runs the forwards of later microbatches "
    "before the backward of this one, so they would read other values than in eager mode. Change "
    "it in forward."
)
REPLACES_A_MODULE = (
    "forward replaces or adds a submodule of {path}, so its first call is unlike the next. "
    "Call the model once before compiling."
)
CARRIES_A_TENSOR = (
    "forward changes {path} and reads it: every microbatch would compute with the value from "
    "before the first step. Register it with `register_buffer`, or pass it as an input. If it is "
    "set by the first call alone, call the model once before compiling."
)
DRAWS_OUTSIDE_TORCH = (
    "forward draws from {generator}{at}. A step is traced once, so every step would use the same "
    "number. Draw it with torch (torch.rand), or pass it as an input."
)
SETS_A_SEED = (
    "forward seeds torch's generator or restores its state{at}. A compiled step draws from one "
    "sequence per microbatch (zbcompile.microbatch_seed), and a graph has no seeds. Draw before "
    "the step, and pass the numbers as an input."
)
HAS_A_GENERATOR = (
    "forward draws from a torch.Generator of its own ({line}), whose state no graph has. Leave "
    "`generator=` out: the numbers are then seeded anew for every microbatch "
    "(zbcompile.microbatch_seed)."
)
CATCHES_A_QUESTION = (
    "forward reads a value that depends on its inputs, and catches the error that this raises in a "
    "trace{at}. Eager mode raises none. Compute with tensors instead (torch.where), or name the "
    'input in static_inputs=("...",).'
)
SPARSE_GRADIENT = (
    "the gradient of {name!r} is sparse, and a pipeline adds dense gradients. Build the embedding "
    "with sparse=False."
)
READS_A_VALUE = (
    "forward or the loss reads a value that depends on its inputs{at}. A compiled step runs "
    "no Python, so it cannot decide by values. Compute with tensors instead (torch.where, masks; "
    "use torch.stack for lists){static}. "
    "Remove an assert, or guard it with `if not torch.compiler.is_compiling()`."
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
FAILS = "{call} fails{at} with {kind}: {error}{advice}"
MIXES_DTYPES = (
    "{operator} gets {dtypes}{at}, and its kernels take one dtype. If the model was converted "
    "(model.double(), model.to(dtype)), convert the batch as well; otherwise cast one of them."
)
NO_LOSS = (
    "the model returned {kind} without a loss; expected a tensor with one element, a mapping or an "
    "object with `loss`, or a tuple that begins with it. Return the loss from forward, or pass "
    "loss=fn(output, target)."
)
RETURNS_NO_TENSOR = (
    "the model returned {kind} without a tensor in it. Return the tensors that evaluation should "
    "compute, in tuples, lists, mappings or attributes of objects."
)
LOSS_IS_NO_TENSOR = (
    "the loss function returned {kind}; expected a tensor with one element, alone or as "
    "(loss, metrics). Return the tensor itself, without .item()."
)
LOSS_HAS_A_SHAPE = (
    "the loss has shape {shape}; expected one element. Reduce it with `.mean()` or `.sum()`, or "
    "pass loss=fn(output, target) if forward returns an output rather than a loss."
)
LOSS_IS_AN_INTEGER = (
    "the loss has dtype {dtype}; expected a floating-point number. A count has no gradient: return "
    "it as a metric, and compute the loss from the outputs."
)
RETURNS_A_NUMBER = (
    "forward or the loss returns a number that it reads from a tensor (.item()), which a compiled "
    "step has not. Return the tensor."
)
LOSS_NAME_IS_TAKEN = (
    "the loss module {loss} has parameters, for which it becomes the submodule loss of the model, "
    "but {model} has another attribute of that name. Rename it, or return the loss from forward."
)
LOSS_IN_A_SEQUENCE = (
    "the loss module {loss} has parameters, for which it becomes the submodule loss of the model, "
    "but an nn.Sequential runs all its submodules. Put the nn.Sequential into a module whose "
    "forward calls it."
)
LOSS_WRITES_ITS_BUFFER = (
    "the loss module changes its buffer {name}, which belongs to no stage. Give it to the model "
    "(model.loss = loss), whose last stage then has it."
)
NOTHING_TO_TRAIN = (
    "the loss does not depend on a trained parameter: there is nothing to train. Check "
    "`requires_grad`, `detach()` and `torch.no_grad()` in forward and loss."
)
PLAIN_COLLECTIVE = (
    "forward calls torch.distributed.{name} on an activation ({line}): autograd does not see it, "
    "so the gradient does not pass through the exchange as it does through a graph. Use the "
    "function of torch.distributed._functional_collectives, or call it in an autograd.Function or "
    "under torch.no_grad()."
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
SHARED_WITH_A_REENTRANT_REGION = (
    "exact=True: the parameter {name!r} is used in a reentrant checkpoint and outside of it. Eager "
    "mode adds both gradients to `.grad` apart, so the last bits of several microbatches differ. "
    "Use checkpoint(..., use_reentrant=False), or exact=False."
)
HAS_A_DYNAMIC_SHAPE = (
    "the shape of a result depends on values of the inputs{at}: nonzero, masked_select and "
    "x[mask] return as many elements as there are. Multiply by the mask, or use "
    "ignore_index{static}. "
    'Experts of transformers: model.set_experts_implementation("grouped_mm").'
)


def at(line: str) -> str:
    """Returns the user's line in parentheses, after a space; "" if it is not known."""
    return f" ({line})" if line else ""


def static(inputs: Collection[str]) -> str:
    """Returns the remedy `static_inputs=` for a value that depends on these inputs; "" if it
    depends on parameters, buffers or random numbers too."""
    if NO_INPUT in inputs:
        return ""
    names = [re.sub(r"kwargs\['(\w+)'\]", r"\1", path) for path in sorted(inputs)]
    tuple_of_names = ", ".join(f'"{name}"' for name in names) or '"..."'
    comma = "," if len(names) < 2 else ""
    return (
        f", or pass static_inputs=({tuple_of_names}{comma}): then every value of "
        f"{'it' if comma else 'them'} compiles a program"
    )


_OF_ONE_DTYPE = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    aten.convolution.default,
)

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
        return data_dependent_error(error, questions)
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


def data_dependent_error(error: Exception, questions: Questions) -> CaptureError:
    """Returns the refusal for an error of torch about values or shapes, with the user's line."""
    sizes = re.search(r"Size-like symbols: u\d", str(error))
    dynamic = sizes is not None or isinstance(error, DynamicOutputShapeException)
    if dynamic:
        place = at(questions.shape_line or _line_of(error))
        text = HAS_A_DYNAMIC_SHAPE.format(at=place, static=static(questions.shape))
        return CaptureError(text)
    place = at(_line_of(error))
    return CaptureError(READS_A_VALUE.format(at=place, static=static(questions.value)))


def refuse_dynamic_shapes(nodes: Iterable[Node], questions: Questions) -> None:
    """Raises CaptureError if a tensor of the graph has a size that is not a number."""
    for node in nodes:
        if has_dynamic_shape(node.meta.get("val")):
            line = annotations_of(node).get(LINE, "")
            remedy = static(questions.shape)
            raise CaptureError(HAS_A_DYNAMIC_SHAPE.format(at=at(line), static=remedy))


def refuse_numbers(nodes: Iterable[Node], questions: Questions) -> None:
    """Raises CaptureError if the graph computes with a number that it reads from a tensor."""
    for node in nodes:
        if node.target is READ_SCALAR:
            line = annotations_of(node).get(LINE, "")
            remedy = static(questions.value)
            raise CaptureError(READS_A_VALUE.format(at=at(line), static=remedy))


def refuse_mixed_dtypes(nodes: Iterable[Node]) -> None:
    """Raises CaptureError for the first product of tensors of two dtypes.

    Fake kernels let it pass, but no kernel computes it.
    """
    for node in nodes:
        if node.target in _OF_ONE_DTYPE:
            dtypes = dict.fromkeys(argument.meta["val"].dtype for argument in node.all_input_nodes)
            if len(dtypes) > 1:
                names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
                place = at(annotations_of(node).get(LINE, ""))
                text = MIXES_DTYPES.format(operator=node.target, dtypes=names, at=place)
                raise CaptureError(text)


def has_dynamic_shape(value: Any) -> bool:
    """Returns True if a tensor in `value` has a size that is not a number."""
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return any(not isinstance(size, int) for tensor in tensors for size in tensor.shape)


def _line_of(error: Exception) -> str:
    """Returns `file:line` of the innermost frame of the user's code in a traceback."""
    line, frame = "", error.__traceback__
    while frame is not None:
        if is_users_frame(frame.tb_frame):
            line = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return line


def refuse_inexact(calls: Sequence[str]) -> None:
    """Raises CaptureError if `exact=True` cannot hold."""
    if calls:
        raise CaptureError(calls[0])
