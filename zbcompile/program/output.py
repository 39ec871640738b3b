"""What a program returns of its forward."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from zbcompile.errors import PipelineError
from zbcompile.passes.capture.training_step import Read
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.torch_names import dtype_named
from zbcompile.passes.vocabulary.log_probs import log_probs
from zbcompile.torch_private import pytree

# What a forward can compute: the model's output, or what is read of it.
FORWARDS: Mapping[str, Read | None] = {"eval": None, "log_probs": log_probs}


@dataclass(frozen=True)
class Output:
    """`structure`, one of torch's pytrees, has the leaves `names` in this order. Those that are tensors are in `made`,
    each with the stage that makes it and its form for one microbatch; `constants` are the others (None, numbers).
    `computes` is the name of what it is, as `python -m zbcompile.compile --also` takes it."""

    computes: str
    structure: Any
    names: tuple[str, ...]
    made: Mapping[str, tuple[int, TensorSpec]]
    constants: Mapping[str, Any]

    def has_rows(self, size: int) -> bool:
        """Whether every tensor has one row for each of `size` samples."""
        return all(spec.shape[:1] == (size,) for _, spec in self.made.values())

    @property
    def rest(self) -> tuple[Any, ...]:
        """All but the rows: the structure, the shape of each tensor without its rows, and the other leaves."""
        shapes = {name: spec.shape[1:] for name, (_, spec) in self.made.items()}
        return self.structure, self.names, shapes, self.constants

    def rebuild(self, leaves: Mapping[str, torch.Tensor]) -> Any:
        """The output with these tensors."""
        if callable(self.structure):
            return self.structure([leaves[name] for name in self.names])
        return pytree.tree_unflatten([leaves.get(n, self.constants.get(n)) for n in self.names], self.structure)


@dataclass(frozen=True)
class _Leaf:
    """Stands for a tensor of the output."""

    name: str


def output_to_data(output: Output | None) -> dict[str, Any] | None:
    """As JSON values. Raises PipelineError for a class that data cannot describe."""
    if output is None:
        return None
    leaves = [_Leaf(name) if name in output.made else output.constants[name] for name in output.names]
    made = {name: [stage, spec_to_data(spec)] for name, (stage, spec) in output.made.items()}
    form = _to_data(pytree.tree_unflatten(leaves, output.structure))
    return {"computes": output.computes, "form": form, "made": made}


def output_from_data(data: dict[str, Any] | None, device: str) -> Output | None:
    """What `output_to_data` wrote; an object of a class comes back as a dictionary."""
    if data is None:
        return None
    leaves, structure = pytree.tree_flatten(_from_data(data["form"]))
    names = tuple(each.name if isinstance(each, _Leaf) else f"constant {i}" for i, each in enumerate(leaves))
    constants = {n: each for n, each in zip(names, leaves, strict=True) if not isinstance(each, _Leaf)}
    made = {name: (int(stage), spec_from_data(spec, device)) for name, (stage, spec) in data["made"].items()}
    return Output(data["computes"], structure, names, made, constants)


def _to_data(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, _Leaf):
        return {"tensor": value.name}
    if is_dataclass(value) and not isinstance(value, Mapping):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"mapping": {key: _to_data(each) for key, each in value.items()}}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_to_data(each) for each in value]}
    raise PipelineError(
        f"the model's output holds a {type(value).__name__}, which a saved program cannot describe. Return tensors, "
        "numbers, and lists, tuples and mappings of them."
    )


def _from_data(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, held),) = data.items()
    if kind == "tensor":
        return _Leaf(held)
    if kind == "mapping":
        return {key: _from_data(each) for key, each in held.items()}
    return {"tuple": tuple, "list": list}[kind](map(_from_data, held))


def spec_to_data(spec: TensorSpec) -> list[Any]:
    return [list(spec.shape), list(spec.stride), spec.dtype, spec.needs_gradient]


def spec_from_data(data: list[Any], device: str) -> TensorSpec:
    shape, stride, dtype, needs_gradient = data
    sizes = sizes_from_data(shape), sizes_from_data(stride)
    dtype_named(dtype)  # a name that torch has
    return TensorSpec(*sizes, dtype, device, bool(needs_gradient))


def sizes_from_data(data: Any) -> tuple[int, ...]:
    """Sizes or strides. Raises TypeError for anything but a list of whole numbers from 0 on."""
    if not isinstance(data, list) or not all(type(size) is int and size >= 0 for size in data):
        raise TypeError(f"{data!r} are no sizes of a tensor")
    return tuple(data)
