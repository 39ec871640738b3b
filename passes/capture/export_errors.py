"""Diagnosis: why a model cannot be captured, in terms of its own lines."""

from torch import nn
from torch.fx import Node

from zbcompile.passes.graph.source_location import failing_line, origin_of

_REMEDIES = (  # (words in the error, what it means, what to do)
    (
        ("which is not a known type",),
        "returns an object of a class that torch.export does not know",
        "Leave it out of the output (transformers' caches: pass use_cache=False, or set model.config.use_cache = "
        "False), or register the class (dataclasses: torch.export.register_dataclass).",
    ),
    (
        ("Size-like symbols: u", "DynamicOutputShape", "aten.nonzero", "unbacked symint", "aten.masked_select"),
        "makes a tensor whose shape depends on the data",
        "Use a mask or torch.where instead of nonzero, boolean indexing or unique (a loss over some rows: give the "
        "others the label ignore_index, -100; transformers' mixtures of experts: "
        'model.set_experts_implementation("batched_mm")).',
    ),
    (
        ("data-dependent", "DataDependent", "Could not guard", ".item()"),
        "makes a Python number, or a decision, from the values of a tensor",
        "Data-dependent Python control flow must become torch.cond or tensor operations such as torch.where; a number "
        "read with .item() must stay a tensor. (An assert, or an if whose body only raises, may ask one tensor.)",
    ),
    (
        ("fake tensor in the exported program constant",),
        "uses something that torch.export cannot trace",
        "Usually it is torch.tensor(...) or .numpy() of a tensor that forward computed; keep it a tensor.",
    ),
    (
        ("functorch tensor", "_unwrap_for_grad"),
        "calls a transform of torch.func (jvp, grad, vmap) on an operation in which torch.export cannot follow it",
        "Write the derivative, or the loop, out as ordinary operations.",
    ),
    (
        ("does not have a registered fake impl", "no fake impl", "UnsupportedFakeTensor", "aren't valid for meta"),
        "calls an operator whose shapes torch cannot infer",
        "Register a fake implementation: @torch.library.register_fake(name).",
    ),
    (
        ("FlexAttention does not support backward on CPU",),
        "calls flex_attention, whose backward runs on GPUs only",
        "Train on a GPU, or call F.scaled_dot_product_attention with a mask.",
    ),
    (
        ("same dtype", "dtypes", "!= ", "same reduction dim", "cannot be multiplied", "must match the size"),
        "mixes dtypes or shapes that do not fit together",
        "Does the batch have the shapes and dtypes that the model takes? If the model was converted (model.double(), "
        "model.to(dtype)), convert the batch as well.",
    ),
)


def export_failure(model: nn.Module, error: BaseException, shape_from_data: str = "") -> str:
    """One message: what failed, where in the user's code, and the remedy if one is known.

    `shape_from_data` is the line that made the first tensor whose shape depends on the data, if there is one: the
    failure often comes much later.
    """
    place = shape_from_data or failing_line(error)
    return f"torch.export cannot capture {type(model).__name__}: {f'{place} ' if place else ''}{_explained(error)}"


def operation_failure(node: Node, error: BaseException) -> str:
    """Why the result of an operation of a captured graph cannot be inferred beforehand."""
    return f"{node.target} ({origin_of(node) or node.name}) {_explained(error)}"


def _explained(error: BaseException) -> str:
    """What the error means and what to do about it, if that is known, followed by its own words."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    first = lines[0].strip() if lines else ""
    text = f"{type(error).__name__}: {error}"
    known = ((meaning, remedy) for words, meaning, remedy in _REMEDIES if any(word in text for word in words))
    meaning, remedy = next(known, ("", ""))
    return (f"{meaning}. {remedy} " if meaning else "") + f"({type(error).__name__}: {first})"
