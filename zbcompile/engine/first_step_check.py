"""Compares in the first step what must be equal on several ranks: losses, gradients, buffers."""

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
from zbcompile.passes.graph.roles import BUFFER, Slot

FEW = 8  # elements: so few may be equal by chance


@dataclass
class FirstStepCheck:
    """Compares each trained parameter's gradient, and each buffer that forward writes, in the first
    step that has it.

    Attributes:
        compared: The names that earlier steps have compared.
        names: Those that the present step compares, equal on all ranks.
        parts: Checksums of what this rank adds to the sums of gradients, if it has many elements.
        divided: Checksums of what it adds to sums that replicas divide.
    """

    ranks: Ranks
    compared: set[str] = field(default_factory=set)
    names: frozenset[str] = frozenset()
    parts: dict[str, int] = field(default_factory=dict)
    divided: dict[str, int] = field(default_factory=dict)

    def begin(self, executable: Executable) -> None:
        """Chooses what the step compares."""
        stages = [stage for bound in executable.distinct for stage in bound.program.stages]
        written = {name for stage in stages for name in stage.changed}
        self.names = (executable.program.trained | written) - self.compared
        self.parts.clear()
        self.divided.clear()

    def note(self, name: str, part: torch.Tensor) -> None:
        """Records what this rank adds to the sum of a gradient."""
        if name in self.names:
            self.divided[name] = checksum(part)
            if part.numel() >= FEW:
                self.parts[name] = self.divided[name]

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
        count = program.schedule.microbatches
        first = ranks.replicas.rank * count
        losses_here = losses[first : first + count, ranks.mesh.index("tp")]
        results: dict[str, torch.Tensor] = {}
        for name in sorted(program.trained & self.names):
            if ranks.rank in program.holders(name):
                # Replicas divide some sums, every rank at other elements.
                checksum_only = torch.tensor(self.divided.get(name, 0) % 2**62)
                gradient = gradients.get(name, checksum_only)
                results[name] = torch.zeros(1) if gradient is None else gradient
        for name, buffer in written_buffers(executable).items():
            if name in self.names:
                results[name] = buffer
        # Replicas have batches of their own, which may be equal.
        dimensions = ranks.mesh.beside("pp", "dp")
        require_equal_results(
            ranks,
            {
                name: (value, along(program.placement(name), REPLICATE))
                for name, value in results.items()
            },
            {
                name: (
                    part,
                    [d for d in along(program.placement(name), PARTIAL) if d in dimensions],
                )
                for name, part in self.parts.items()
            },
            tuple(losses_here.tolist()),
            program.trained,
        )
        self.compared |= self.names
        self.names = frozenset()


def written_buffers(executable: Executable) -> dict[str, torch.Tensor]:
    """Returns the buffers that forwards write on this rank, by name."""
    buffers = {
        name: stage.resident[Slot(BUFFER, name)]
        for graphs in executable.distinct
        for stage in graphs.stages.values()
        for name in stage.program.changed
    }
    return dict(sorted(buffers.items()))
