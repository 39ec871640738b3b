"""What ranks outside the pipeline must have in common is compared in the first step, unless it was proven at compile
time (`zbcompile.program_cache.compared_graphs`). What was zero then is compared once it is not.

No digest can carry this (`zbcompile.distributed.agreement`): ranks that sum in another order have gradients that differ
in their last bits, and contributions to one sum must differ, not agree. A step without news exchanges nothing for it:
whether there is any travels with the losses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from zbcompile.distributed.equal_tensors import checksum, require_equal_losses, require_equal_results
from zbcompile.distributed.ranks import Ranks
from zbcompile.model.placements import PARTIAL, REPLICATE, along
from zbcompile.passes.graph.roles import Slot
from zbcompile.program.program import Program
from zbcompile.runtime.executable import Executable

ENOUGH = 8  # elements: fewer may be equal by chance
Found = Mapping[str, torch.Tensor | None]


@dataclass
class EqualResults:
    """`pending` says, alike on all ranks, whether any of them has something left to compare: what is in `settled` has
    been; `first` whether their losses have not been compared yet. `program` is that of the last step, `parts` are
    checksums of what this rank adds to the sums of this one."""

    ranks: Ranks
    settled: set[str] = field(default_factory=set)
    pending: bool = False
    first: bool = False
    program: Program | None = None
    parts: dict[str, int] = field(default_factory=dict)

    def begin(self, program: Program) -> None:
        """A step begins. Another program trains other parameters."""
        compares = self.ranks.mesh.beside("pp", "dp") or (program.unproven or {}).get("dp")
        self.first = self.first or (program is not self.program and bool(compares))
        self.pending = self.pending or self.first
        self.program = program
        self.parts.clear()

    def note(self, name: str, part: torch.Tensor) -> None:
        """What this rank adds to the sum of a gradient."""
        if self.pending and part.numel() >= ENOUGH and self._open_along(name):
            self.parts[name] = checksum(part)

    def has_news(self, executable: Executable, gradients: Found) -> bool:
        """Whether something here that has not been compared is not zero."""
        found = self._unsettled(executable, gradients) if self.pending else {}
        return self.first or any(bool(value.any()) for value in found.values())

    def compare(self, executable: Executable, gradients: Found, losses: torch.Tensor) -> None:
        """Raise PipelineError on every rank if something differs. Some rank has news."""
        program, ranks = executable.program, self.ranks
        require_equal_losses(ranks, losses)
        self.first = False
        if not (program.unproven is None or any(program.unproven.values())):
            self.pending = False
            return
        count = program.schedule.microbatches
        own = losses[ranks.replicas.rank * count :][:count, ranks.mesh.index("tp")]
        summed = {n: set(along(program.placement(n), PARTIAL)).intersection(self._open_along(n)) for n in self.parts}
        parts = {name: (value, sorted(summed[name])) for name, value in self.parts.items()}
        found = self._unsettled(executable, gradients)
        whole = {name: (value, along(program.placement(name), REPLICATE)) for name, value in found.items()}
        self.pending = require_equal_results(ranks, whole, parts, tuple(own.tolist()), program.trained)
        self.settled |= {name for name, value in found.items() if value.any()}

    def _open_along(self, name: str) -> list[str]:
        """The dimensions along which nothing was proven of a gradient or buffer."""
        unproven = None if self.program is None else self.program.unproven
        if unproven is None:
            return list(self.ranks.mesh.beside("pp", "dp"))
        return [dimension for dimension, names in unproven.items() if name in names]

    def _unsettled(self, executable: Executable, gradients: Found) -> dict[str, torch.Tensor]:
        """What this rank computes as a whole: gradients (zeros for those that it has not got yet) and buffers."""
        program = executable.program
        names = [
            n for n in program.trained - self.settled if self.ranks.rank in program.holders(n) and self._open_along(n)
        ]
        held = {name: gradients.get(name) for name in sorted(names)}
        found = {name: torch.zeros(1) if each is None else each for name, each in held.items()}
        written = written_buffers(executable).items()
        return found | {name: each for name, each in written if name not in self.settled and self._open_along(name)}


def written_buffers(executable: Executable) -> dict[str, torch.Tensor]:
    """The buffers into which forwards write on this rank, by name."""
    found: dict[str, torch.Tensor] = {}
    for stage in (stage for graphs in executable.everywhere for stage in graphs.stages.values()):
        found |= {name: stage.resident[Slot("buffer", name)] for name in stage.program.changed}
    return dict(sorted(found.items()))
