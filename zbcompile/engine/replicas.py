"""Sums of gradients outside the pipeline: over replicas that train on different batches, and over
the ranks of other dimensions of the mesh that compute parts of a gradient.

The gradients of a stage are reduced as soon as its last W has run, while the remaining stages and
ranks continue. The factor 1/replicas of a mean loss enters as the tangent of the loss, like the
1/microbatches, so a reduction is a sum.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch
import torch.distributed as dist

from zbcompile.distributed.mesh import Mesh, Replicas
from zbcompile.distributed.parcels import Parcel, send
from zbcompile.engine.gradients import Gradients
from zbcompile.engine.optimizer_parameters import LATE, Observe, OptimizerParameters
from zbcompile.errors import PipelineError
from zbcompile.model.held_elsewhere import is_held_elsewhere
from zbcompile.model.placements import PARTIAL, along
from zbcompile.program.program import Program

Way = tuple[dist.ProcessGroup, torch.dtype | None]


@dataclass(frozen=True)
class Sum:
    """Over whom a gradient is summed; `first` says whether this rank is the first of them."""

    group: dist.ProcessGroup
    first: bool


def sums_of(program: Program, mesh: Mesh, rank: int) -> dict[str, Sum]:
    """The sums of the parameters that pipeline rank `rank` trains, by name, and of its buffers.
    Makes the groups."""
    names = [n for n, stages in program.homes.items() if set(stages) & set(program.stages_of(rank))]
    over = {name: along(program.placement(name), PARTIAL) for name in names}
    groups = {each: mesh.group(*each) for each in sorted(set(over.values()))}
    found = {name: (groups[each], mesh.index(*each) == 0) for name, each in over.items()}
    return {name: Sum(group, first) for name, (group, first) in found.items() if group is not None}


@dataclass(frozen=True)
class SumPlan:
    """When the gradients of a rank are complete, and which of them are summed over other ranks, as
    `over` says.

    `complete` are those that the last W of a stage completes, by stage, and `early` those of them
    that are summed then; `late` are summed at the end of the step.
    """

    complete: Mapping[int, tuple[str, ...]]
    early: Mapping[int, tuple[str, ...]]
    late: tuple[str, ...]
    over: Mapping[str, Sum]

    @cached_property
    def summed(self) -> frozenset[str]:
        return frozenset(self.late).union(*self.early.values())


def plan_sums(program: Program, rank: int, over: Mapping[str, Sum]) -> SumPlan:
    """The plan of pipeline rank `rank`."""
    complete = {stage: program.complete_with(stage) for stage in program.stages_of(rank)}
    early = {
        stage: tuple(name for name in names if name in over) for stage, names in complete.items()
    }
    held = {name for stage in complete for name in program.stages[stage].trained}
    late = sorted(name for name in program.late - (program.shared - held) if name in over)
    return SumPlan(complete, early, tuple(late), over)


def _require_all(parts: Iterable[str]) -> None:
    """Refuse a step that would leave parts unsummed."""
    left = sorted(parts)
    if left:
        raise PipelineError(
            f"inside no_sync, a batch trained {left[0]}, which this batch does not train, so that"
            " its gradient would never be summed over the ranks. End no_sync with a batch that"
            " trains the same parameters."
        )


def unobserved(name: str, part: torch.Tensor) -> None:
    """Nobody looks at the parts of sums."""


@dataclass
class Reduction:
    """The reductions of one step on a rank: `parcels[stage]` are under way. `slices` are those of
    all optimizers: what replicas divide in them is summed to its owners. `observe` sees what this
    rank adds to each sum.
    """

    replicas: Replicas
    plan: SumPlan
    gradients: Gradients
    slices: Sequence[OptimizerParameters] = ()
    observe: Observe = unobserved
    parcels: defaultdict[int, list[Parcel[str]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        """Let `.grad` of what all replicas hold be counted once. Raises PipelineError for a sum
        that would be lost."""
        plan, partial, parameters = self.plan, self.replicas.partial, self.gradients.parameters
        self.divided = [each for each in self.slices if each.zero]
        self.reduces = bool(plan.over or self.divided) and self.replicas.synchronise
        if self.reduces:
            _require_all(
                name for name in partial - plan.summed if parameters[name].grad is not None
            )
        for name in plan.summed - partial:
            if not plan.over[name].first and (gradient := parameters[name].grad) is not None:
                gradient.zero_()

    def start(self, stage: int) -> None:
        """Begin to reduce a stage's gradients; returns at once. What no microbatch here trained,
        those of another replica did: it takes part with zeros."""
        for each in self.divided:
            each.reduce(stage, self.gradients, self.observe)
        names = sorted(
            self._whole(self.plan.early[stage]), key=lambda name: self.order[self._way(name)]
        )
        for way, found in groupby(names, key=self._way):
            self._send(stage, way, ((name, self._part(name, stage)) for name in found))

    def _send(self, stage: int, way: Way, gradients: Iterable[tuple[str, torch.Tensor]]) -> None:
        group, travel = way
        self.parcels[stage] += send(
            gradients, lambda flat: dist.all_reduce(flat, group=group, async_op=True), travel
        )

    def _part(self, name: str, stage: int) -> torch.Tensor:
        own = self.gradients[name].total()
        part = self.gradients[name].buffer(stage) if own is None else own
        self.observe(name, part)
        return part

    def finish_stage(self, stage: int) -> None:
        """Wait for the sums of a stage."""
        for parcel in self.parcels.pop(stage, ()):
            parcel.unpack()
        for each in self.divided:
            each.finish(stage)

    def finish(self) -> None:
        """Reduce what several stages share, and wait for everything.

        Shared gradients are sent alone: their holders must add in the same order, or they would
        drift apart.
        """
        self.replicas.partial = set() if self.reduces else self.replicas.partial | self.plan.summed
        for each in self.divided if self.reduces else ():
            each.reduce(LATE, self.gradients, self.observe)
        for name in self._whole(self.plan.late) if self.reduces else ():
            found = self.gradients[name].total()
            if found is not None:
                self.observe(name, found)
                self._send(LATE, self._way(name), [(name, found)])
        for stage in list(self.parcels):
            for parcel in self.parcels.pop(stage):
                parcel.unpack()
        for each in self.divided:
            each.finish()

    def results(self) -> dict[str, torch.Tensor | None]:
        """The gradients that this rank has after the step, whole or its part."""
        found = self.gradients.parameters.items()
        whole = {
            name: None if is_held_elsewhere(parameter) else parameter.grad
            for name, parameter in found
        }
        return whole | {name: part for each in self.divided for name, part in each.sums().items()}

    def _whole(self, names: Sequence[str]) -> list[str]:
        """Those of which every replica gets the whole sum."""
        return [
            name for name in names if not any(name in each.local_names for each in self.divided)
        ]

    def _way(self, name: str) -> Way:
        """Over whom a whole gradient is summed, and how it travels."""
        return self.plan.over[name].group, next(
            (s.reduce_dtype for s in self.slices if name in s.local_names), None
        )

    @cached_property
    def order(self) -> dict[Way, int]:
        """The ways, numbered as all ranks of a group do: as the parameters come."""
        return {way: i for i, way in enumerate(dict.fromkeys(map(self._way, self.plan.over)))}
