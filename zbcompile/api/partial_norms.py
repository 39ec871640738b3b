"""Parameters of which other processes have gradients, too. torch's clipping would use this
process's norm alone, so it is refused."""

from collections.abc import Iterator, Sequence

import torch

from zbcompile.errors import PipelineError
from zbcompile.model.distributed_tensors import Parts
from zbcompile.model.held_elsewhere import is_held_elsewhere
from zbcompile.model.placements import SHARD, along
from zbcompile.program.program import Program
from zbcompile.program_cache.bound_programs import BoundPrograms
from zbcompile.torch_private import before_clipping

_PARTIAL = (  # the attribute of such a parameter: how many there are
    "pipelines_with_a_part_of_its_norm"
)


class PartialNorms:
    """Marks the parameters of one pipeline, so that torch's clipping recognises them however they
    were passed to it."""

    def __init__(self, bound: BoundPrograms, parts: Parts) -> None:
        self._bound, self._parts = bound, parts
        self.program: Program | None = None  # whose parameters are marked
        self._noted: list[torch.Tensor] = []

    def note(self) -> None:
        """Mark the parameters, after they have got their places or others."""
        self.close()
        before_clipping(_refuse_parts)
        self.program = self._bound.program
        self._noted = [] if self.program is None else list(self._found(self.program))
        for each in self._noted:
            setattr(each, _PARTIAL, getattr(each, _PARTIAL, 0) + 1)

    def close(self) -> None:
        """Remove the marks, except those of another pipeline."""
        for each in self._noted:
            setattr(each, _PARTIAL, getattr(each, _PARTIAL) - 1)
        self._noted = []

    def _found(self, program: Program) -> Iterator[torch.Tensor]:
        """Every parameter if there are several pipeline ranks, else what is sharded, as a plain
        tensor; torch's norm of DTensors is that of the whole."""
        ranks, wholes = self._bound.ranks, self._parts.parameters
        for name, parameter in self._bound.parameters.items() if ranks.group is not None else ():
            if ranks.count > 1 or ranks.mesh.size(*along(program.placement(name), SHARD)) > 1:
                yield parameter
            if ranks.count > 1 and name in wholes:
                yield wholes[name]


def _refuse_parts(parameters: Sequence[torch.Tensor]) -> None:
    if any(getattr(each, _PARTIAL, 0) or is_held_elsewhere(each) for each in parameters):
        raise PipelineError(
            "torch's clip_grad_norm_ would clip by the norm of the gradients in this process, which"
            " differs from rank to rank. Call pipe.clip_grad_norm_(max_norm) on every rank, or pass"
            " clip= to pipe.optimizer."
        )
