"""What a program returns of its forward."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zbcompile.errors import PipelineError
from zbcompile.passes.capture.structures import OutputStructure, TensorPosition, vars_of
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.torch_names import dtype_named
from zbcompile.passes.vocabulary.log_probs import log_probs

# What a forward can compute: the model's output, or what is read of it.
FORWARDS: Mapping[str, Callable[[Any, Any], Any] | None] = {"eval": None, "log_probs": log_probs}


@dataclass(frozen=True)
class Output:
    """A value that a program returns of its forward.

    Attributes:
        computes: Its name, such as "eval", as `python -m zbcompile.compile --also` takes
        it. structure: The value with a position in the place of every tensor. made: The stage that
        makes each tensor and its form for one microbatch, by slot name, in the order of positions.
    """

    computes: str
    structure: OutputStructure
    made: Mapping[str, tuple[int, TensorSpec]]

    @property
    def constants(self) -> tuple[Any, ...]:
        """The leaves that are no tensors."""
        return self.structure.constants

    def has_rows(self, size: int) -> bool:
        """Returns True if every tensor has one row for each of `size` samples."""
        return all(spec.shape[:1] == (size,) for _, spec in self.made.values())

    def joins(self, other: "Output") -> bool:
        """Returns True if the rows of both outputs can be concatenated: all else is equal."""
        shapes = [
            {name: spec.shape[1:] for name, (_, spec) in each.made.items()}
            for each in (self, other)
        ]
        return self.structure == other.structure and shapes[0] == shapes[1]

    def rebuild(self, tensors: Mapping[str, Any]) -> Any:
        """Returns the output with other tensors, by slot name."""
        return self.structure.rebuild([tensors[name] for name in self.made])


def output_to_data(output: Output | None) -> dict[str, Any] | None:
    """Returns an output as JSON values. Raises PipelineError for a class that data cannot
    describe."""
    if output is None:
        return None
    made = {name: [stage, spec_to_data(spec)] for name, (stage, spec) in output.made.items()}
    return {"computes": output.computes, "form": _to_data(output.structure.template), "made": made}


def output_from_data(data: dict[str, Any] | None, device: str) -> Output | None:
    """Returns the output that `output_to_data` wrote; an object of a class comes back as a
    dictionary."""
    if data is None:
        return None
    made = {
        name: (int(stage), spec_from_data(spec, device))
        for name, (stage, spec) in data["made"].items()
    }
    return Output(data["computes"], OutputStructure(_from_data(data["form"], len(made))), made)


def _to_data(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, TensorPosition):
        return {"tensor": value.index}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_to_data(each) for each in value]}
    mapping = value if isinstance(value, Mapping) else vars_of(value)
    if mapping and all(isinstance(key, str) for key in mapping):
        return {"mapping": {key: _to_data(each) for key, each in mapping.items()}}
    raise PipelineError(
        f"the model's output holds a {type(value).__name__}, which a saved program cannot describe."
        " Return tensors, numbers, and lists, tuples and mappings of them."
    )


def _from_data(data: Any, tensors: int) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind == "tensor":
        return TensorPosition(range(tensors)[value])
    if kind == "mapping":
        return {key: _from_data(each, tensors) for key, each in value.items()}
    return {"tuple": tuple, "list": list}[kind](_from_data(each, tensors) for each in value)


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
