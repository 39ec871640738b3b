"""What an optimizer is told of a pipeline once that is compiled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.model.placements import SHARD, along
from zbcompile.program.program import Program
from zbcompile.runtime.data_parallel import LATE, Sum


@dataclass(frozen=True)
class TrainedParameters:
    """The parameters of a pipeline, by their first names.

    `model` are all of the model as users see them (DTensors as such), the same names on every rank; `own` those of this
    process as plain tensors, of `rows` only its rows; `shown` those of `own` as users see them, whose gradients
    `take_gradients` gives to the plain ones. `sums` says over whom gradients are summed.
    """

    program: Program
    ranks: Ranks
    sums: Mapping[str, Sum]
    model: Mapping[str, torch.Tensor]
    own: Mapping[str, nn.Parameter]
    shown: Mapping[str, nn.Parameter]
    rows: frozenset[str]
    take_gradients: Callable[[], None]

    def stage_of(self, name: str) -> int:
        """The stage whose last W completes the gradient of a parameter; `LATE` if only the step's end does."""
        program, homes = self.program, self.program.homes[name]
        rows = () if program.vocabulary is None else program.vocabulary.parameters
        return LATE if program.copies > 1 or len(homes) > 1 or name in rows else homes[0]

    def counts(self, name: str, *dimensions: str) -> bool:
        """Whether this process speaks for its part of a parameter: the first of all that hold it. Along `dimensions`
        every rank speaks for a part of its own."""
        split = along(self.program.placement(name), SHARD)
        mesh, first = self.ranks.mesh, self.program.holders(name)[0]
        return (name in self.rows or first in self.ranks.local) and (
            mesh.index(*mesh.beside("pp", *dimensions, *split)) == 0
        )

    def require_whole(self, name: str, kind: str, zero: int) -> None:
        """Refuse a parameter of which this process has only a part, for an optimizer that needs all of it."""
        if is_distributed(self.model[name]) and not zero:
            return  # the optimizer sees the DTensor
        split = [f'"{each}"' for each in along(self.program.placement(name), SHARD) if self.ranks.mesh.size(each) > 1]
        where = "the pipeline's ranks" if name in self.rows else split and f"{split[0]} of the mesh"
        if where:
            raise PipelineError(
                f"{name} is sharded over {where}, so that {kind}, which does not update element by element, would see "
                "a part of it only. Leave it out (params=) and train it with AdamW, say."
            )
