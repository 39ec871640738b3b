"""The tensors of the user's module: those that graphs ask for, and those of other ranks, which are
on the meta device.

torch refuses to compute with tensors on the meta device, and a state dict of the module raises, as
it would hold nothing of other ranks. `pipe.state_dict(full=True)` has the whole model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import PART, TensorPart, is_distributed
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.meta_device import is_on_meta, on_device
from zbcompile.passes.torch_names import type_text
from zbcompile.passes.torch_private import tensor_tables


def resident_tensors(model: nn.Module, constants: Mapping[str, Tensor]) -> dict[Slot, Tensor]:
    """Parameters, buffers and a capture's constants by slot."""
    tensors: dict[Slot, Tensor] = {
        Slot("constant", name): tensor for name, tensor in constants.items()
    }
    tensors.update({Slot("parameter", name): tensor for name, tensor in model.named_parameters()})
    tensors.update({Slot("buffer", name): tensor for name, tensor in model.named_buffers()})
    return tensors


def require_same_tensors(model: nn.Module, bound: Mapping[Slot, tuple[Tensor, str]]) -> None:
    """Raise unless the model still has the `bound` tensors: a replaced Parameter would silently
    stop training.

    `bound` has every tensor with its kind at the time of compiling.
    """
    both = (model.named_parameters, model.named_buffers)  # with every name of a tied tensor
    by_name = {name: value for named in both for name, value in named(remove_duplicate=False)}
    for slot in {**bound, **resident_tensors(model, {})} if bound else ():
        tensor, kind = bound.get(slot, (None, ""))
        now = by_name.get(slot.name)
        if tensor is None:
            change = "is new since the model was compiled"
        elif now is None:
            change = "was there when the model was compiled and is gone"
        elif now is not tensor:
            change = "was replaced by another tensor after the model was compiled"
        elif kind_of(now) != kind:
            change = f"was {kind} when it was compiled and is {kind_of(now)} now"
        else:
            continue
        raise PipelineError(
            f"{slot} {change}. Change values in place (tensor.copy_, pipe.load_state_dict), and let"
            " forward skip layers (self.layers[: self.active]). For other tensors, data types or"
            " devices make a new pipeline."
        )


def kind_of(tensor: Tensor) -> str:
    """Data type, shape and device, for messages and comparison."""
    return f"{type_text(tensor)} on {tensor.device}"


_META = torch.device("meta")
_allowed: ContextVar[bool] = ContextVar("local state dicts", default=False)


def move_to_meta(model: nn.Module, is_remote: Callable[[str], bool]) -> None:
    """Replaces the parameters and buffers whose first names are remote, in every module that has
    them."""
    replaced: dict[int, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_remote(name) and not tensor.is_meta:
            remote = replaced[id(tensor)] = on_device(tensor, _META)
            remote._backward_hooks = tensor._backward_hooks
            part = getattr(tensor, PART, None)
            if part is not None:
                full_tensor = part.wrap(remote.detach())
                if isinstance(tensor, nn.Parameter):
                    full_tensor = nn.Parameter(full_tensor, tensor.requires_grad)
                setattr(remote, PART, TensorPart(full_tensor, part.dimensions))
    for table, name, tensor in list(tensor_tables(model)):
        if id(tensor) in replaced:
            table[name] = replaced[id(tensor)]


def local_state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns the state dict of the module: meta tensors of other ranks, local parts of
    DTensors."""
    with local_state_allowed():
        state = model.state_dict()
    return {
        key: value.to_local() if is_distributed(value) else value for key, value in state.items()
    }


def refuse_state_dict(model: nn.Module, summary: str) -> None:
    """Lets `model.state_dict()` raise PipelineError while tensors of other ranks are on the meta
    device. `summary` says what this process holds."""
    model.register_state_dict_pre_hook(partial(_refuse, summary))


def _refuse(summary: str, model: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not _allowed.get() and is_on_meta(model):
        raise PipelineError(
            f"this process holds {summary}, not the whole model. Call pipe.state_dict(full=True) on"
            " every rank, or zbcompile.save_weights."
        )


@contextmanager
def local_state_allowed() -> Iterator[None]:
    """Allows `model.state_dict()` inside; tensors of other ranks are on the meta device."""
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)
