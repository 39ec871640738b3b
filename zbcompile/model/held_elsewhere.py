"""Parameters and buffers of a model that other ranks train: this process has old values of them, so
code that reads these gets an error that says what to call.

Such a tensor keeps its identity and its memory, but gets a class that allows only reading its
shape, dtype and the like.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.torch_private import pytree, without_overrides

_WHERE = "held_by"  # the attribute with the name of the tensor and the ranks that hold it
_VALUES = (
    "data",
    "T",
    "mT",
    "H",
    "mH",
    "real",
    "imag",
)  # attributes that are views of the values; others tell a form
_FORMS = {
    *(
        "size",
        "stride",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "storage_offset",
        "get_device",
    ),
    *(
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_shared",
        "is_pinned",
        "requires_grad_",
    ),
    *("data_ptr", "untyped_storage", "register_hook", "register_post_accumulate_grad_hook"),
}
_MERGE = ("merge_adapter", "merge_and_unload")  # methods of PEFT's models


class HeldElsewhere:
    """The class, in front of a tensor's own, that marks values as those of another rank."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        accessor = func.__name__ if func.__name__ in ("__get__", "__set__", "__delete__") else ""
        name = func.__self__.__name__ if accessor else func.__name__
        if not _tells_a_form(name, accessor):
            found = next(
                each for each in pytree.tree_leaves((args, kwargs)) if is_held_elsewhere(each)
            )
            fills = name == "copy_" and found is args[0]
            if not fills or any(map(is_held_elsewhere, args[1:])):
                raise PipelineError(_refusal(found))
        with without_overrides():
            result = func(*args, **(kwargs or {}))
        if name == "copy_":
            release(args[0])  # it has been given values
        return result

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"<{' of rank '.join(getattr(self, _WHERE))}>"


def _tells_a_form(name: str, accessor: str) -> bool:
    if accessor:
        return name not in _VALUES and (
            accessor != "__set__" or name in ("grad", "grad_dtype", "requires_grad")
        )
    return name in _FORMS or name.endswith("_like") or name.startswith("new_")


def _refusal(tensor: torch.Tensor) -> str:
    name, ranks = getattr(tensor, _WHERE)
    return (
        f"{name} belongs to rank {ranks} of the pipeline, and the module in this process has old"
        " values of it, so it is not read. Call pipe.eval, pipe.state_dict(full=True),"
        " pipe.clip_grad_norm_ or zbcompile.save_weights; or"
        " model.load_state_dict(pipe.state_dict(full=True)), on every rank and before"
        " pipe.close(), which makes the module whole until the next step."
    )


@cache
def _class_of(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    return type(kind)(f"{kind.__name__}HeldElsewhere", (HeldElsewhere, kind), {})  # type: ignore[misc]


def is_held_elsewhere(value: Any) -> bool:
    """Whether reading this tensor is refused."""
    return issubclass(type(value), HeldElsewhere)


def withhold(tensor: torch.Tensor, name: str, ranks: Sequence[int]) -> None:
    """Refuse to read a tensor that these ranks hold, until something is copied into it."""
    if not is_held_elsewhere(tensor):
        tensor.__class__ = _class_of(type(tensor))
        setattr(tensor, _WHERE, (name, " and ".join(map(str, ranks))))


def refuse_merging(model: nn.Module) -> None:
    """Let adapters of PEFT be merged only while the model is whole: PEFT writes into weights layer
    by layer, so an error at one of another rank would leave those before it merged."""
    for module in model.modules():
        for name in _MERGE:
            if hasattr(type(module), name):
                setattr(module, name, partial(_merge_if_whole, module, name))


def _merge_if_whole(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    held = next(filter(is_held_elsewhere, module.parameters()), None)
    if held is not None:
        raise PipelineError(_refusal(held))
    return getattr(type(module), name)(module, *args, **kwargs)


def release(tensor: torch.Tensor) -> None:
    """Let a tensor be read again."""
    if is_held_elsewhere(tensor):
        tensor.__class__ = type(tensor).__mro__[2]


@contextmanager
def readable(model: nn.Module) -> Iterator[None]:
    """Inside, all tensors of the model can be read, by code that needs only shapes or handles old
    values itself."""
    held = [
        tensor for tensor in (*model.parameters(), *model.buffers()) if is_held_elsewhere(tensor)
    ]
    for tensor in held:
        release(tensor)
    try:
        yield
    finally:
        for tensor in held:
            tensor.__class__ = _class_of(type(tensor))


def state_in_process(model: nn.Module) -> dict[str, Any]:
    """A state dict of what is in this process's memory: old values of other ranks' tensors, parts
    of DTensors."""
    with readable(model):
        state = model.state_dict()
    return {
        key: value.to_local() if is_distributed(value) else value for key, value in state.items()
    }
