"""Sentences about models that an exported step cannot contain or reproduce."""

import re
from collections.abc import Collection

NO_INPUT = ""  # among the inputs that a value depends on: parameters, buffers, random numbers

WRITES_A_PARAMETER = (
    "forward writes a parameter ({line}). A pipeline runs the forwards of later microbatches "
    "before the backward of this one, so they would read other values than in eager mode. Write it "
    "after the optimizer's step, or compute with a changed copy."
)
NO_METRICS = (
    "return_metrics=True, but no loss function returned metrics. Pass loss=fn(output, target) that "
    "returns (loss, metrics), or leave out return_metrics."
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
    "forward or the loss reads a tensor that requires a gradient, but is not a parameter of the "
    "model ({line}): its gradient would be lost. Register it as a parameter of the model or of a "
    "loss module, or detach it."
)
READS_PARAMETER_STATE = (
    "forward reads or sets {attribute} of a parameter ({line}), which another microbatch may have "
    "changed; a graph has none. Settle it before the step, or pass what it needs as an input."
)
READS_A_TENSOR_ATTRIBUTE = (
    "forward or the loss reads .{name} of a tensor ({line}), an attribute that was set on a "
    "parameter or buffer. A traced tensor has none. Keep it on the module: `self.{name} = ...`."
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
    "Remove an assert, or guard it with `if not torch.compiler.is_compiling()`. Give a batch norm "
    "a momentum: without one it reads the number of batches so far."
)
DRAWS_IN_BACKWARD = (
    "the backward draws random numbers ({operator}, of {line}): under a pipeline the backwards of "
    "microbatches run in another order than in eager mode. Draw the numbers in forward and save "
    "them."
)
COMMUNICATES_IN_A_BRANCH = (
    "{operator} communicates inside of torch.cond: ranks that take another branch would not take "
    "part. Communicate before or after the branch."
)
FAILS = "{call} fails{at} with {kind}: {error}{advice}"
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
