"""What a forward-only program returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zbcompile.passes.capture.training_step import Read
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.vocabulary.log_probs import log_probs, log_probs_and_entropies
from zbcompile.torch_private import pytree

# What a forward can compute: the model's output, or what is read of it.
FORWARDS: Mapping[str, Read | None] = {"eval": None, "log_probs": log_probs, "entropies": log_probs_and_entropies}


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
        return pytree.tree_unflatten([leaves.get(n, self.constants.get(n)) for n in self.names], self.structure)
