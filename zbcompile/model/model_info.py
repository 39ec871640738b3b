"""A program's description of its model: every parameter and buffer by name and shape, and the
tensors that no state dict holds. Enough to build a module that has the model's names and memory,
and none of its code."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbcompile.model.module_tensors import local_state_allowed
from zbcompile.passes.torch_names import dtype_named
from zbcompile.passes.torch_private import FakeTensor


class Member(NamedTuple):
    """A parameter or buffer of the model. `first` is the first name of the same tensor (a different
    one if tensors are tied), `saved` says whether eager's state dict holds it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    trainable: bool
    saved: bool
    first: str


@dataclass(frozen=True)
class ModelFacts:
    """`name` is that of the model's class, `members` are in eager's order, module by module.
    `constants` are the tensors that capture lifted out of the model, `unsaved` the buffers that no
    state dict holds, both by name.
    """

    name: str
    members: tuple[Member, ...]
    constants: Mapping[str, Tensor] = field(repr=False)
    unsaved: Mapping[str, Tensor] = field(repr=False)

    @cached_property
    def names(self) -> dict[str, str]:
        """Every parameter's and buffer's name -> the first name of the same tensor."""
        return {member.name: member.first for member in self.members}


def first_names(model: nn.Module) -> dict[str, str]:
    """Returns the first name of every parameter's and buffer's tensor: eager's name for it."""
    first: dict[int, str] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def has_values(tensor: Tensor) -> bool:
    """Returns whether a tensor has memory. One of a model built on the meta device or under fake
    tensors has none."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def facts_of(model: nn.Module, constants: Mapping[str, Tensor]) -> ModelFacts:
    """Describe `model`; the tensors stay where they are."""
    with local_state_allowed():
        saved = set(model.state_dict(keep_vars=True))
    first = first_names(model)
    members, unsaved = [], {}
    for path, module in model.named_modules(remove_duplicate=False):  # as in a state dict
        for leaf, tensor in (
            *module.named_parameters("", False, False),
            *module.named_buffers("", False, False),
        ):
            name, dtype = f"{path}.{leaf}".lstrip("."), str(tensor.dtype).removeprefix("torch.")
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            layout = tuple(tensor.shape), tuple(tensor.stride()), dtype, tensor.requires_grad
            members.append(Member(name, kind, *layout, name in saved, first[name]))
            if name not in saved:
                unsaved[name] = tensor
    return ModelFacts(type(model).__name__, tuple(members), dict(constants), unsaved)


def module_of(facts: ModelFacts) -> nn.Module:
    """A module with the model's parameters and buffers under their names, on the meta device;
    without a forward.

    Buffers that no state dict holds exist only if `facts.unsaved` has them, on the meta device if
    they have no values.
    """
    tensors_by_name = dict(facts.unsaved)
    members = [member for member in facts.members if member.saved or member.name in facts.unsaved]
    tensors = {
        member.name: tensors_by_name.setdefault(
            member.first, facts.unsaved.get(member.name, on_meta(member))
        )
        for member in members
    }
    return module_with(tensors, facts.name, {member.name for member in members if not member.saved})


def module_with(
    tensors: Mapping[str, Tensor], title: str, unsaved: Collection[str] = ()
) -> nn.Module:
    """An otherwise empty module that holds parameters and buffers under their own dotted names;
    those that are `unsaved` are buffers that no state dict holds."""
    root: nn.Module = type(title, (nn.Module,), {})()
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = root
        for name_of_child in filter(None, path.split(".")):
            if name_of_child not in dict(module.named_children()):
                module.add_module(name_of_child, nn.Module())
            module = module.get_submodule(name_of_child)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(leaf, tensor)
        else:
            module.register_buffer(leaf, tensor, persistent=name not in unsaved)
    return root


def on_meta(member: Member) -> Tensor:
    """A parameter or buffer without memory."""
    dtype = dtype_named(member.dtype)
    tensor = torch.empty_strided(member.shape, member.stride, dtype=dtype, device="meta")
    return (
        nn.Parameter(tensor, requires_grad=member.trainable)
        if member.kind == "parameter"
        else tensor
    )
