"""Compares, in the first step, what ranks outside of the pipeline must have in common: losses,
gradients, buffers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from zbcompile.distributed.equal_tensors import (
    checksum,
    require_equal_losses,
    require_equal_results,
)
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.executable import Executable
from zbcompile.model.placements import PARTIAL, REPLICATE, along
from zbcompile.passes.graph.roles import Slot
from zbcompile.program.program import Program

FEW = 8  # elements: so few may be equal by chance


@dataclass
class FirstStepCheck:
    """Compares each trained parameter's gradient, and each buffer that forward writes, in the first
    step that has it.

    `names` are those that the present step compares, alike on all ranks, and `compared` those of
    earlier steps. `parts` are the checksums of what this rank adds to the sums of gradients.
    """

    ranks: Ranks
    compared: set[str] = field(default_factory=set)
    names: frozenset[str] = frozenset()
    parts: dict[str, int] = field(default_factory=dict)

    def begin(self, executable: Executable) -> None:
        """Chooses what the step compares."""
        written = (
            n
            for each in executable.everywhere
            for stage in each.program.stages
            for n in stage.changed
        )
        self.names = frozenset({*executable.program.trained, *written} - self.compared)
        self.parts.clear()

    def note(self, name: str, part: torch.Tensor) -> None:
        """Records what this rank adds to the sum of a gradient."""
        if name in self.names and part.numel() >= FEW:
            self.parts[name] = checksum(part)

    def compare(
        self,
        executable: Executable,
        gradients: Mapping[str, torch.Tensor | None],
        losses: torch.Tensor,
    ) -> None:
        """Raises PipelineError on every rank if something differs, or is summed although it is
        whole already."""
        program, ranks = executable.program, self.ranks
        require_equal_losses(ranks, losses)
        first, count = (
            ranks.replicas.rank * program.schedule.microbatches,
            program.schedule.microbatches,
        )
        own = losses[first : first + count, ranks.mesh.index("tp")]
        results = {
            name: (value, _along(program, name, REPLICATE))
            for name, value in self._results(program, gradients)
        }
        results |= {
            name: (buffer, _along(program, name, REPLICATE))
            for name, buffer in written_buffers(executable).items()
            if name in self.names
        }
        beside = ranks.mesh.beside(
            "pp", "dp"
        )  # replicas have batches of their own, which may be equal
        summed = {
            name: [each for each in _along(program, name, PARTIAL) if each in beside]
            for name in self.parts
        }
        parts = {name: (self.parts[name], dimensions) for name, dimensions in summed.items()}
        require_equal_results(ranks, results, parts, tuple(own.tolist()), program.trained)
        self.compared |= self.names
        self.names = frozenset()

    def _results(
        self, program: Program, gradients: Mapping[str, torch.Tensor | None]
    ) -> list[tuple[str, torch.Tensor]]:
        """The gradients of this rank's parameters; zero for one that has none."""
        held = sorted(
            name
            for name in program.trained & self.names
            if self.ranks.rank in program.holders(name)
        )
        found = [(name, gradients.get(name)) for name in held]
        return [
            (name, torch.zeros(1) if gradient is None else gradient) for name, gradient in found
        ]


def _along(program: Program, name: str, kind: str) -> tuple[str, ...]:
    """The dimensions of the mesh besides "pp" along which a parameter or buffer has this
    placement."""
    return along(program.placement(name), kind)


def written_buffers(executable: Executable) -> dict[str, torch.Tensor]:
    """The buffers into which forwards write on this rank, by name."""
    found: dict[str, torch.Tensor] = {}
    for stage in (stage for graphs in executable.everywhere for stage in graphs.stages.values()):
        found |= {name: stage.resident[Slot("buffer", name)] for name in stage.program.changed}
    return dict(sorted(found.items()))
