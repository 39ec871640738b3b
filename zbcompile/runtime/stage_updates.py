"""The optimizer's part of a step, as actions: which of them the step has, and what they do on one rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from zbcompile.program.program import Program
from zbcompile.runtime.data_parallel import Reduction
from zbcompile.runtime.gradient_buffers import Gradients
from zbcompile.runtime.sharded_updates import Early, Sharded
from zbcompile.schedules.ir.actions import GATHER, OPT, REDUCE, VALIDATE


@dataclass
class StageUpdates:
    """What VALIDATE, GATHER, REDUCE and OPT do for a stage; `reduction` is None in one process."""

    program: Program
    gradients: Gradients
    early: Sequence[Early] = ()
    validating: Sequence[Early] = ()
    reduction: Reduction | None = None

    @property
    def sharded(self) -> Sequence[Sharded]:
        return self.reduction.sharded if self.reduction is not None else ()

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of actions that the step has."""
        reduces = self.reduction is not None and self.reduction.reduces
        has = {VALIDATE: self.validating, GATHER: self.sharded, REDUCE: reduces, OPT: self.early}
        return frozenset(kind for kind, found in has.items() if found)

    def validate(self) -> None:
        """Correct the updates of the last step, if they were made too early."""
        for each in self.validating:
            each.settle()

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
