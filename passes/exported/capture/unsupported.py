"""What an exported step cannot contain or reproduce, and the sentences that say so."""

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from zbcompile.passes.errors import CaptureError
from zbcompile.passes.exported.capture.source_lines import LINE, is_users_frame, users_line
from zbcompile.passes.exported.step_graph import tensors_of
from zbcompile.passes.exported.torch_private import (
    DATA_DEPENDENT_ERRORS,
    DynamicOutputShapeException,
    annotations_of,
    pytree,
)

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


class FunctionCalls(TorchFunctionMode):
    """A function mode around forward and loss.

    It refuses assignments to `.data`, and reads the numbers of a list that torch.tensor takes.

    Attributes:
        inexact: A sentence for every call whose bits differ from eager mode.
    """

    def __init__(self, number_of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inexact: list[str] = []
        self._number_of = number_of

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _SET_DATA and args[0] is args[1]:  # module.to(dtype) without a change
            return None
        if func == _SET_DATA:
            raise CaptureError(SETS_DATA.format(line=users_line(sys._getframe(1))))
        if func is torch.tensor and args and isinstance(args[0], list | tuple):
            args = (pytree.tree_map_only(Tensor, self._number_of, args[0]), *args[1:])
        description = INEXACT_FUNCTIONS.get(getattr(func, "__name__", ""))
        if description is not None:
            call = f"{description} ({users_line(sys._getframe(1))})"
            self.inexact.append(INEXACT.format(call=call))
        return func(*args, **(kwargs or {}))


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]

WRITES_A_PARAMETER = (
    "forward writes a parameter ({line}). A pipeline runs the forwards of later microbatches "
    "before the backward of this one, so they would read other values than in eager mode. Write it "
    "after the optimizer's step, or compute with a changed copy."
)
IS_A_WRAPPER = "{module} is a {kind}, which cannot be captured. {remedy}"
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
    "forward replaces a submodule of {path} by another one, so its first call is unlike the next. "
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
    "no Python, so it cannot decide by values. Compute with tensors instead (torch.where, "
    "masks){static}."
)
DRAWS_IN_BACKWARD = (
    "the backward draws random numbers ({operator}, of {line}): under a pipeline the backwards of "
    "microbatches run in another order than in eager mode. Draw the numbers in forward and save "
    "them."
)
UNNAMED_GROUP = "{operator} communicates over a {kind}; expected the name of a process group."
COLLECTIVE_WITHOUT_A_GRADIENT = (
    "forward calls torch.distributed.{name} on an activation{at}. Autograd does not see it, so "
    "gradients would not pass through the exchange as they do through the graph. Use the function "
    "of torch.distributed._functional_collectives, or call it in an autograd.Function or under "
    "torch.no_grad()."
)
COMMUNICATES_IN_A_BRANCH = (
    "{operator} communicates inside of torch.cond: ranks that take another branch would not take "
    "part. Communicate before or after the branch."
)
LOSS_IS_NO_TENSOR = (
    "the loss is {kind}; expected a tensor with one element. Pass `loss=` as a function of "
    "(output, target), or return the loss from forward: alone, as `.loss`, or first in a tuple."
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
SHARED_WITH_A_REENTRANT_REGION = (
    "exact=True: the parameter {name!r} is used in a reentrant checkpoint and outside of it. Eager "
    "mode adds both gradients to `.grad` apart, so the last bits of several microbatches differ. "
    "Use checkpoint(..., use_reentrant=False), or exact=False."
)
HAS_A_DYNAMIC_SHAPE = (
    "the shape of a result depends on values of the inputs{at}: nonzero, masked_select and "
    "x[mask] return as many elements as there are. Multiply by the mask, or use "
    "ignore_index{static}. Experts of transformers: "
    'model.set_experts_implementation("grouped_mm").'
)


# What an error of torch means, by a part of its text.
_EXPLANATIONS = {
    "data is not allocated yet": (
        "It calls a kernel outside of PyTorch's dispatcher, or one that reads values in Python. "
        "Wrap it with torch.library.custom_op. F.ctc_loss: pass the lengths as tensors."
    ),
    ".numpy()": (
        "Compute with torch, or wrap the function with torch.library.custom_op and "
        "register_autograd."
    ),
    "concrete integers": (
        "A size depends on values of the inputs. Pass it as a Python number{static}."
    ),
    "fake impl": "Register the operator's shapes with torch.library.register_fake.",
    "UnsupportedOperator": "Register the operator's shapes with torch.library.register_fake.",
    "does not support backward on CPU": (
        "Train on a GPU, or call F.scaled_dot_product_attention with a mask."
    ),
    "requires_grad flags": "Set requires_grad of parameters outside of forward.",
    "aliasing": "Return new tensors from the branches of torch.cond: `.clone()`.",
}
NOT_EXPORTED = "torch.export cannot capture {model}{at}: {error}. {explanation}"


def export_error(error: Exception, model: str, inputs: Collection[str]) -> CaptureError:
    """Returns the refusal for any error of torch or the model in a trace, with the user's line.

    `inputs` are the batch inputs that the last value depends on which Python asked for.
    """
    if isinstance(error, DATA_DEPENDENT_ERRORS):
        return _data_dependent_error(error, inputs)
    text = f"{type(error).__name__}: {error}"
    explanation = next((words for sign, words in _EXPLANATIONS.items() if sign in text), "")
    explanation = explanation.format(static=static(inputs))
    first_line = next((line for line in text.splitlines() if line.strip()), "").strip(" .")
    sentence = NOT_EXPORTED.format(
        model=model, at=at(_line_of(error)), error=first_line, explanation=explanation
    )
    return CaptureError(sentence.strip())


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


def _data_dependent_error(error: Exception, inputs: Collection[str]) -> CaptureError:
    """Returns the refusal for an error of torch about values or shapes, with the user's line."""
    sizes = re.search(r"Size-like symbols: u\d", str(error))
    dynamic = sizes is not None or isinstance(error, DynamicOutputShapeException)
    message = HAS_A_DYNAMIC_SHAPE if dynamic else READS_A_VALUE
    return CaptureError(message.format(at=at(_line_of(error)), static=static(inputs)))


def refuse_collective(name: str) -> None:
    """Raises CaptureError for an in-place collective that eager's autograd does not see."""
    line = users_line(sys._getframe(1))
    raise CaptureError(COLLECTIVE_WITHOUT_A_GRADIENT.format(name=name, at=at(line)))


def refuse_dynamic_shapes(nodes: Iterable[Node], inputs: Collection[str]) -> None:
    """Raises CaptureError if a tensor of the graph has a size that is not a number."""
    for node in nodes:
        for tensor in tensors_of(node):
            if any(not isinstance(size, int) for size in tensor.shape):
                line = annotations_of(node).get(LINE, "")
                sentence = HAS_A_DYNAMIC_SHAPE.format(at=at(line), static=static(inputs))
                raise CaptureError(sentence)


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
