"""Every refusal of the passes that capture a model: what a graph would lose or cannot have, and what to do instead.

A refusal is raised, or noted by what watches a trace, where it is found; its words stand here. A test keeps everybody
else from having words of their own, and the table in docs/models.md equal to this one.
"""

from enum import Enum
from typing import Any

from zbcompile.passes.errors import CaptureError

_NO_HOOKS = "gradients of a compiled stage do not pass through autograd, so"
_AS_OPERATOR = "a torch.library.custom_op with register_autograd."


class Refusal(Enum):
    """What is found, with the names that it has there in braces, and the remedy. An error of torch is explained by a
    refusal if it contains one of its `signs`."""

    # Modules and parameters, before anything is traced
    WRAPPER = "{module} is a {wrapper}, which cannot be captured.", "{instead}"
    CONTEXT_PARALLEL = (
        "inside torch's context_parallel(), attention takes DTensors and the batch is cut in place.",
        'Compile and step outside of it, with "cp" in mesh= and the exchange of keys and values written in the model '
        "(functional collectives).",
    )
    LAZY = (
        "{module} is lazy and has no shapes yet.",
        "Call the model once with a batch before compiling, or give the layer its sizes.",
    )
    COMPILED = (
        "{module} was already wrapped by torch.compile; zbcompile traces the plain module.",
        "Pass the module as it was before torch.compile (model._orig_mod).",
    )
    REPLACED_WEIGHT = (
        "{module} has torch.nn.utils.{function}, whose hook replaces {parameter} before every forward.",
        "Use torch.nn.utils.parametrizations.{function}, which computes the same.",
    )
    PRUNED = (
        "{module} is pruned: a hook replaces a parameter before every forward.",
        "Call torch.nn.utils.prune.remove to keep the pruned values, or torch.nn.utils.parametrize."
        "register_parametrization with a module that multiplies by the mask, to train under it.",
    )
    SPARSE_MODULE = (
        "{module} has sparse=True; zbcompile accumulates dense gradients only.",
        "Build it with sparse=False.",
    )
    SPARSE_CALL = (
        "{operation} is an embedding with sparse=True ({line}); zbcompile accumulates dense gradients only.",
        "Use sparse=False.",
    )
    MOMENTUM = (
        "{module} has momentum=None: it divides by the number of batches so far, which it reads out of a tensor in "
        "every forward.",
        "Give it a momentum, such as 0.1.",
    )
    NOTHING_TRAINS = "no parameter of {model} requires a gradient;", "there is nothing to train."
    SHARED_MEMORY = (
        "parameters {one} and {other} are different Parameter objects over the same memory; on different ranks they "
        "would drift apart.",
        "Tie them by assigning one Parameter to both, or clone one of them.",
    )
    TRAINED_LOSS = (
        "the loss function {loss} reads {name}, which requires a gradient but is not a parameter of the model; its "
        "gradient would be lost.",
        "Move it into the model and return the loss from forward.",
    )
    LOSS_NAME = (
        "the loss module {loss} has parameters, for which it becomes the submodule loss of the model, but {model} has "
        "another attribute of that name.",
        "Rename it, or return the loss from forward.",
    )
    LOSS_IN_SEQUENCE = (
        "the loss module {loss} has parameters, for which it becomes the submodule loss of the model, but an "
        "nn.Sequential runs all its submodules.",
        "Put the nn.Sequential into a module whose forward calls it.",
    )

    # Hooks
    GLOBAL_HOOKS = (
        "{hooks} for all modules are registered; a compiled stage never calls a module, so they would be silently "
        "lost.",
        "Register forward hooks on the modules themselves, and remove these.",
    )
    FUNCTION_MODE = (
        "the torch function mode {mode} is on; a compiled stage calls none of torch's functions, so the mode would be "
        "silently lost.",
        "Leave it before the step, or enter it in forward.",
    )
    MODULE_HOOKS = (
        f"{{module}} has {{hooks}}; {_NO_HOOKS} a hook would be silently lost.",
        f"Remove the hook before compiling, or write it as {_AS_OPERATOR}",
    )
    PARAMETER_HOOKS = (
        f"parameter {{name}} has {{hooks}}; {_NO_HOOKS} the hook would never fire.",
        "Remove it before compiling and work on .grad after step() instead.",
    )
    ACTIVATION_HOOK = (
        f"forward calls {{function}} on an activation ({{line}}); {_NO_HOOKS} it would be silently lost.",
        f"Write it as {_AS_OPERATOR}",
    )
    LATE_MODULE_HOOK = (
        f"forward registers a backward hook on a module ({{line}}); {_NO_HOOKS} it would be silently lost.",
        f"Write it as {_AS_OPERATOR}",
    )
    NODE_HOOK = (
        f"forward registers a hook on a node of autograd ({{line}}); {_NO_HOOKS} it would be silently lost.",
        f"Write it as {_AS_OPERATOR}",
    )

    # Gradients
    OWN_GRADIENTS = (
        "forward computes gradients itself ({line}); gradients of gradients cannot be split over stages.",
        "Write the derivative out as ordinary operations.",
    )
    PLAIN_COLLECTIVE = (
        "forward calls torch.distributed.{function} on an activation ({line}); autograd does not see it, so gradients "
        "would not pass through the exchange as they do through the graph.",
        "Use the corresponding function of torch.distributed._functional_collectives, or call it under "
        "torch.no_grad().",
    )
    NO_DERIVATIVE = (
        "{operation} has no derivative ({line}: {error}).",
        "Register one with torch.library.register_autograd, or detach its input if no gradient should flow.",
    )
    LOSS_WITHOUT_GRADIENT = (
        "the loss has no gradient: {stops}.",
        "Compute it from trainable parameters with differentiable operations.",
    )
    OUTPUT_WITHOUT_GRADIENT = (
        "{name} gets a gradient but depends on no parameter or activation",
        "that requires one.",
    )
    PARAMETER_STATE = (
        "forward asks about {attribute} of a parameter ({line}), which another microbatch may have changed; a graph "
        "has none.",
        "Pass what it needs as an input.",
    )
    REQUIRES_GRAD = (
        "forward changes requires_grad of a parameter ({line});",
        "which parameters train must be settled before the step.",
    )
    IN_PLACE_INEXACT = (
        "stage {stage} contains {operation}, which writes in place below autograd (torch's recurrent layers do); its "
        "split form is not bitwise equal to eager.",
        "Use exact=False (equal within 1e-6), or write the layer with ordinary tensor operations.",
    )
    NO_FUNCTIONAL_FORM = (
        "stage {stage} contains {operation}, which writes in place below autograd, and torch has no functional form "
        "of it{error}.",
        "Write that layer with ordinary tensor operations.",
    )
    ONEDNN_LSTM = (
        "the model runs an LSTM through oneDNN, whose backward cannot be separated from its forward.",
        "Set torch.backends.mkldnn.enabled = False before compiling (with exact=True, layers with dropout between them "
        "then need exact=False as well), or write the layer with ordinary operations.",
    )
    MIXED_DTYPES = (
        "{operation} mixes {dtypes} ({line}).",
        "If the model was converted (model.double(), model.to(dtype)), convert the batch as well; otherwise cast one "
        "of them.",
    )

    # Writes
    MODULE_REPLACED = (
        "forward replaces the module {path} by another one, so its first call is unlike the next.",
        "Call the model once before compiling.",
    )
    PARAMETER_REPLACED = (
        "forward replaces a parameter by another one, which no optimizer has.",
        "Change it outside of forward, or compute with another tensor.",
    )
    BUFFER_REPLACED = (
        "forward replaces buffer {name} of {module} ({before}) by {now}; a compiled graph needs it to keep its shape "
        "and dtype.",
        "If it does after the first call, call the model once before compiling.",
    )
    PYTHON_CHANGE = (
        "forward changes {path} ({line}) and reads it; every microbatch would compute with the value that it had at "
        "capture.",
        "Register it with register_buffer, or pass it as an input; if it settles after a first call, call the model "
        "once before compiling.",
    )
    SET_DATA = (
        "forward, or a Function in it, assigns to tensor.data ({line}), which a compiled graph would not do.",
        "Change a buffer in place (tensor.copy_), under torch.no_grad().",
    )
    INPUT_WRITTEN = (
        "forward changes its input {name} in place, and with it the batch.",
        "Work on a copy: {name}.clone().",
    )
    PARAMETER_WRITTEN = (
        "forward changes parameter {name} in place; every microbatch would start from a different value.",
        "Do it between steps, under torch.no_grad().",
    )
    LOSS_BUFFER = (
        "the loss module changes its buffer {name}, which belongs to no stage.",
        "Give it to the model (model.loss = loss), whose last stage then has it.",
    )
    HIDDEN_WRITE = (
        "{line} writes in place where autograd does not see it (under no_grad, or through .detach() or .data), and a "
        "tensor over the same memory that takes part in gradients is read later: its gradient would be another than "
        "eager's.",
        "Make a new tensor (x = x * 2), or write into a copy (x.detach().clone()).",
    )
    STRIDED_WRITE = (
        "{line} writes through as_strided into a tensor that is not contiguous, whose gradient torch does not know in "
        "functional form.",
        "Make it contiguous before (x = x.contiguous()).",
    )
    WRITTEN_EXCHANGE = (
        "an autograd.Function ({line}) exchanges in place, in a tensor that the model also reads elsewhere ({name}); "
        "in the graph only its result is the exchanged one.",
        "Let it work on a copy: x.clone().",
    )

    # Python, and values that decide
    OWN_RANDOM = (
        "forward draws from {generator}{line}; capture runs forward once, so every step would use the same number.",
        "Draw it with torch (torch.rand), or pass it as an input.",
    )
    SEED = (
        "forward {does} torch's generator{line}; a compiled step draws from one sequence per microbatch "
        "(zbcompile.microbatch_seed), and a graph has no seeds.",
        "Draw before the step, and pass that as an input.",
    )
    GENERATOR = (
        "forward draws from a torch.Generator of its own, whose state no graph has.",
        "Leave generator= out: what is drawn then is seeded anew for every microbatch (zbcompile.microbatch_seed).",
    )
    STATE_OF_TORCH = (
        "forward asks torch for {asked} ({line}); a compiled step would keep the answer that it got at capture.",
        "Ask outside of forward, and keep the answer in an attribute: a step sees whether that has changed.",
    )
    ATTENTION_KERNELS = (
        "forward chooses attention kernels itself ({line}); a graph keeps such a region only for SDPBackend.MATH "
        "around F.scaled_dot_product_attention.",
        "Put sdpa_kernel around every pipe.step instead, or leave the choice to torch.",
    )
    CAUGHT_QUESTION = (
        "forward makes a Python number, or a decision, from the values of a tensor ({line}), and catches the error "
        "that this raises in a capture; eager raises none.",
        "Use a tensor operation (torch.where), or do it outside of forward.",
    )
    UNREPEATABLE_QUESTION = "forward asks about values in a way that a graph cannot repeat:", "{line}."
    OTHER_QUESTION = "forward decides by more than the values of its inputs:", "{line}."

    # Functions
    UNTRACED_FUNCTION = (
        "the autograd.Function {function} has a {part} that cannot be traced ({line}: {error}).",
        "Write it with torch operations, or as a torch.library.custom_op.",
    )
    FUNCTION_READS = (
        "the autograd.Function {function} reads a tensor in its backward that it did not read when forward called it, "
        "since something around it has changed meanwhile.",
        "Pass that as an argument.",
    )
    FUNCTION_STATISTICS = (
        "the autograd.Function {function} updates the running statistics of a batch norm, which the graph would lose.",
        "Call batch_norm in the model's forward.",
    )
    FUNCTION_INPUT = (
        "the autograd.Function {function} changes one of its inputs in place.",
        "Let it return a new tensor.",
    )
    FUNCTION_INPUT_LATER = (
        "the autograd.Function {function} changes one of its inputs in place, in its backward.",
        "Let it work on a copy: x.clone().",
    )
    FUNCTION_AROUND = (
        "the autograd.Function {function} changes a tensor around it in place (a buffer, an attribute, one of a "
        "closure), which the graph would lose.",
        "Let it return the new value, and copy that into the tensor in the model's forward.",
    )
    FUNCTION_RANDOM = (
        "the autograd.Function {function} draws random numbers in its backward; a step draws all of them in its "
        "forwards.",
        "Draw in forward.",
    )

    # What goes in and comes out
    NO_LOSS = (
        "the model returned {kind} without a loss; expected a scalar tensor, a mapping or object with .loss, or a "
        "tuple that begins with it.",
        "Return the loss from forward, or pass loss=fn(output, target).",
    )
    LOSS_KIND = "the loss is a {kind}; expected a scalar tensor", "alone, or (loss, metrics) and return_metrics=True."
    LOSS_SHAPE = (
        "the loss has shape {shape}; expected a scalar.",
        "Reduce it (for example .mean()), or pass loss=fn(output, target) when forward returns an output rather than a "
        "loss.",
    )
    LOSS_DTYPE = "the loss has dtype {dtype};", "expected a floating-point scalar."
    NO_METRICS = (
        "return_metrics=True, but {missing}.",
        "Pass loss=fn(output, target) that returns (loss, metrics), or leave out return_metrics.",
    )
    DTENSOR_OUTPUT = "the model returns a DTensor, which return_outputs= cannot hold.", "Leave it out."
    UNKNOWN_INPUT = "the graph has an input of kind {kind} ({name}),", "which no stage can own."
    UNKNOWN_OUTPUT = "the graph has an output of kind {kind} ({name}),", "which no stage can produce."
    UNKNOWN_CONSTANT = "the graph refers to a constant {name}", "that torch.export did not keep as a tensor."
    NO_LOGITS = (
        "the model returned {kind} without logits; expected a tensor [..., words], or a mapping or object with "
        ".logits.",
        "Return them, or leave out the argument that makes forward return the loss alone.",
    )
    LOGITS_SHAPE = (
        "the model returned {found}, which is no logits; expected floating-point [..., words] with a score for every "
        "word.",
        "Return the output layer's result.",
    )
    PART_OF_LOGITS = (
        "the logits are this rank's part of them, by its part of {parameter}; a distribution needs all words.",
        "Gather them in forward, or return the DTensor (use_local_output=False).",
    )
    LABELS = (
        "labels= is {found} and the logits are {logits};",
        "expected the number of a word for every token, integers {shape} ({ignored} where there is none).",
    )

    # Collectives
    PIPELINE_GROUP = (
        "{line} communicates with the ranks of the pipeline, of which only one runs that operation; it would wait for "
        "ever.",
        "Use a group of another dimension of the mesh.",
    )
    UNKNOWN_GROUP = (
        "{operation} communicates, inside an autograd.Function, with a process group that is no dimension of the mesh.",
        "Pass mesh= to zbcompile.pipeline, and use mesh.get_group(dimension) in the model.",
    )
    UNNAMED_GROUP = (
        "{operation} got its process group as a {kind}; a graph can hold only the group's name.",
        "Switch torch.distributed.config.compile_on_one_rank off.",
    )
    COLLECTIVE_IN_BRANCH = (
        "{operation} is inside a branch of the model (torch.cond, or another control flow operator); the ranks of its "
        "group might not all take that branch, and would wait for ever.",
        "Move it out.",
    )

    # Errors of torch, by what they say
    NOT_EXPORTED = "torch.export cannot capture {model}:", "{place}{why}"
    NOT_INFERRED = "{operation} ({line})", "{why}"
    UNKNOWN_CLASS = (
        "returns an object of a class that torch.export does not know.",
        "Leave it out of the output (transformers' caches: pass use_cache=False, or set model.config.use_cache = "
        "False), or register the class (dataclasses: torch.export.register_dataclass).",
        "which is not a known type",
    )
    SHAPE_FROM_DATA = (
        "makes a tensor whose shape depends on the data.",
        "Use a mask or torch.where instead of nonzero, boolean indexing or unique (a loss over some rows: give the "
        "others the label ignore_index, -100; transformers' mixtures of experts: "
        'model.set_experts_implementation("grouped_mm")).',
        *("Size-like symbols: u", "DynamicOutputShape", "aten.nonzero", "unbacked symint", "aten.masked_select"),
    )
    NUMBER_FROM_DATA = (
        "makes a Python number, or a decision, from the values of a tensor.",
        "Data-dependent Python control flow must become torch.cond or tensor operations such as torch.where; a number "
        "read with .item() must stay a tensor. (Allowed: an assert, or an if that only raises, on one tensor.)",
        *("data-dependent", "DataDependent", "Could not guard", ".item()"),
    )
    FAKE_CONSTANT = (
        "uses something that torch.export cannot trace.",
        "Usually it is torch.tensor(...) or .numpy() of a tensor that forward computed; keep it a tensor.",
        "fake tensor in the exported program constant",
    )
    TRANSFORM = (
        "calls a transform of torch.func (jvp, grad, vmap) on an operation in which torch.export cannot follow it.",
        "Write the derivative, or the loop, out as ordinary operations.",
        *("functorch tensor", "_unwrap_for_grad", "executing %_guards_fn"),  # 2.13: it gets None for what jvp took
    )
    NO_FAKE = (
        "calls an operator whose shapes torch cannot infer.",
        "Register a fake implementation: @torch.library.register_fake(name).",
        *("does not have a registered fake impl", "no fake impl", "UnsupportedFakeTensor", "aren't valid for meta"),
    )
    FLEX_ATTENTION = (
        "calls flex_attention, whose backward runs on GPUs only.",
        "Train on a GPU, or call F.scaled_dot_product_attention with a mask.",
        "FlexAttention does not support backward on CPU",
    )
    MISFIT = (
        "mixes dtypes or shapes that do not fit together.",
        "Does the batch have the shapes and dtypes that the model takes? If the model was converted (model.double(), "
        "model.to(dtype)), convert the batch as well.",
        *("same dtype", "dtypes", "!= ", "same reduction dim", "cannot be multiplied", "must match the size"),
    )

    def __init__(self, found: str, remedy: str, *signs: str) -> None:
        self.found, self.remedy, self.signs = found, remedy, signs

    def text(self, **names: Any) -> str:
        """The sentences for a user."""
        return f"{self.found} {self.remedy}".format(**names)

    def error(self, **names: Any) -> CaptureError:
        return CaptureError(self.text(**names))


def explanation(error: BaseException) -> str:
    """What an error of torch means and what to do about it, if that is known, followed by its own words."""
    text = f"{type(error).__name__}: {error}"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    known = next((each.text() for each in Refusal if any(sign in text for sign in each.signs)), "")
    return f"{known} ({type(error).__name__}: {first})".lstrip()
