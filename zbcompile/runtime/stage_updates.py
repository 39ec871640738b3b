"""The optimizer's part of a step, as actions: which of them the step has, and what they do on one rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from zbcompile.program.program import Program
from zbcompile.runtime.data_parallel import Reduction
from zbcompile.runtime.gradient_buffers import Gradients
from zbcompile.runtime.sharded_updates import Early, Sharded
from zbcompile.schedules.ir.actions import GATHER, OPT, REDUCE


@dataclass
class StageUpdates:
    """What REDUCE, OPT and GATHER do for a stage; `reduction` is None in one process."""

    program: Program
    gradients: Gradients
    early: Sequence[Early] = ()
    reduction: Reduction | None = None

    @property
    def sharded(self) -> Sequence[Sharded]:
        return self.reduction.sharded if self.reduction is not None else ()

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of actions that the step has."""
        reduces = self.reduction is not None and self.reduction.reduces
        wanted = {GATHER: bool(self.sharded), REDUCE: reduces, OPT: bool(self.early)}
        return frozenset(kind for kind, has in wanted.items() if has)

    def arrive(self, stage: int) -> None:
        """Wait for the parameters that the last update gave to a stage."""
        for each in self.sharded:
            each.arrive(stage)

    def reduce(self, stage: int) -> None:
        """Begin to sum a stage's gradients."""
        if self.reduction is not None:
            self.reduction.start(stage)

    def update(self, stage: int) -> None:
        """Update a stage's parameters, once its gradients are summed."""
        if self.reduction is not None:
            self.reduction.finish_stage(stage)
        self.gradients.finish(self.program.complete_with(stage))
        for each in self.early:
            each.update(stage)
