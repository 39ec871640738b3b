"""The outputs of the forward that a program returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zbcompile.errors import PipelineError
from zbcompile.passes.capture.structures import OutputStructure, TensorPosition, vars_of
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.vocabulary.log_probs import log_probs, log_probs_of_first_word

# What a forward can compute: the model's output, or what is read of it.
FORWARDS: Mapping[str, Callable[[Any, Any], Any] | None] = {
    "eval": None,
    "log_probs": log_probs,
    "placement": log_probs_of_first_word,
}


@dataclass(frozen=True)
class Output:
    """A value that a program returns of its forward.

    Attributes:
        computes: Its name, such as "eval".
        structure: The value with a position in the place of every tensor.
        made: The stage that computes each tensor and its form for one microbatch, by slot name, in
            the order of positions.
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
            {name: spec.shape[1:] for name, (_, spec) in output.made.items()}
            for output in (self, other)
        ]
        return self.structure == other.structure and shapes[0] == shapes[1]

    def rebuild(self, tensors: Mapping[str, Any]) -> Any:
        """Returns the output with other tensors, by slot name."""
        return self.structure.rebuild([tensors[name] for name in self.made])


def structure_to_data(structure: OutputStructure) -> Any:
    """Returns the structure of an output as JSON values. Raises PipelineError for a class that
    data cannot describe."""
    return _to_data(structure.template)


def structure_from_data(data: Any) -> OutputStructure:
    """Returns the structure that `structure_to_data` wrote; an object comes back as a
    dictionary."""
    return OutputStructure(_from_data(data))


def _to_data(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, TensorPosition):
        return {"tensor": value.index}
    if isinstance(value, list | tuple):
        entries = [_to_data(entry) for entry in value]
        return {"tuple" if isinstance(value, tuple) else "list": entries}
    mapping = value if isinstance(value, Mapping) else vars_of(value)
    if mapping and all(isinstance(key, str) for key in mapping):
        return {"mapping": {key: _to_data(entry) for key, entry in mapping.items()}}
    raise PipelineError(
        f"the model's output holds a {type(value).__name__}, which a saved program cannot describe."
        " Return tensors, numbers, and lists, tuples and mappings of them."
    )


def _from_data(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind == "tensor":
        return TensorPosition(value)
    if kind == "mapping":
        return {key: _from_data(entry) for key, entry in value.items()}
    return {"tuple": tuple, "list": list}[kind](_from_data(entry) for entry in value)
