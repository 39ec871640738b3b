"""Sums of gradients outside the pipeline: over replicas that train on different batches, and over
the ranks of other dimensions of the mesh that compute parts of a gradient.

The gradients of a stage are reduced as soon as its last W has run, while the remaining stages and
ranks continue. The factor 1/replicas of a mean loss enters as the tangent of the loss, like the
1/microbatches, so a reduction is a sum.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from zbcompile.distributed.mesh import Mesh, Replicas
from zbcompile.distributed.transport import as_contiguous
from zbcompile.engine.gradients import Gradients
from zbcompile.engine.optimizer_parameters import LATE, OptimizerParameters
from zbcompile.errors import PipelineError
from zbcompile.model.placements import PARTIAL, along
from zbcompile.program.program import Program

Route = tuple[dist.ProcessGroup, torch.dtype | None]  # the group, and the dtype of the messages
# What is as large is sent from its memory; smaller gradients are copied together.
ALONE_BYTES = 1 << 20


@dataclass(frozen=True)
class Sum:
    """Over whom a gradient is summed; `first` says whether this rank is the first of them."""

    group: dist.ProcessGroup
    first: bool


def sums_of(program: Program, mesh: Mesh, rank: int) -> dict[str, Sum]:
    """Returns over whom the gradients of pipeline rank `rank`, and its buffers, are summed, by
    name. Creates the process groups, so all ranks call it."""
    stages = set(program.stages_of(rank))
    names = [name for name, homes in program.homes.items() if stages.intersection(homes)]
    dimensions = {name: along(program.placement(name), PARTIAL) for name in names}
    groups = {axes: mesh.group(*axes) for axes in sorted(set(dimensions.values()))}
    return {
        name: Sum(group, mesh.index(*axes) == 0)
        for name, axes in dimensions.items()
        if (group := groups[axes]) is not None
    }


@dataclass(frozen=True)
class SumPlan:
    """When the gradients of a rank are complete, and when they are summed over other ranks.

    Attributes:
        complete: The parameters that the last W of a stage completes, by stage.
        early: Those of them that are summed then.
        late: Those that are summed at the end of the step.
        over: Over whom each is summed.
    """

    complete: Mapping[int, tuple[str, ...]]
    early: Mapping[int, tuple[str, ...]]
    late: tuple[str, ...]
    over: Mapping[str, Sum]

    @cached_property
    def summed(self) -> frozenset[str]:
        return frozenset(self.late).union(*self.early.values())


def plan_sums(program: Program, rank: int, over: Mapping[str, Sum]) -> SumPlan:
    """Returns the plan of pipeline rank `rank`."""
    complete = {
        stage: tuple(name for name in program.stages[stage].trained if name not in program.late)
        for stage in program.stages_of(rank)
    }
    # in the model's order, which is the same on all ranks of a group, also if their shapes differ
    early = {stage: tuple(n for n in over if n in names) for stage, names in complete.items()}
    trained = {name for stage in complete for name in program.stages[stage].trained}
    late = sorted(name for name in program.late - (program.shared - trained) if name in over)
    return SumPlan(complete, early, tuple(late), over)


@dataclass
class Bucket:
    """Dense gradients of one dtype whose sum is under way as `flat`: the memory of a single one, or
    a copy of several, or in another dtype."""

    gradients: Sequence[Tensor]
    flat: Tensor
    work: dist.Work

    def unpack(self) -> None:
        """Waits for the sum, and writes it into the gradients."""
        self.work.wait()
        parts = self.flat.view(-1).split([gradient.numel() for gradient in self.gradients])
        for gradient, part in zip(self.gradients, parts, strict=True):
            if gradient.data_ptr() != part.data_ptr():
                target = as_contiguous(gradient)
                target.copy_(part.view(target.shape))


def sum_up(gradients: Iterable[Tensor], route: Route) -> Iterator[Bucket]:
    """Begins to sum gradients, which have equal sizes on all ranks of the group. Yields them in
    buckets."""
    group, dtype = route
    buckets: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        key = gradient.dtype if gradient.nbytes < ALONE_BYTES else id(gradient)
        buckets.setdefault(key, []).append(gradient)
    for members in buckets.values():
        views = [as_contiguous(gradient) for gradient in members]
        flat = views[0] if len(views) == 1 else torch.cat([view.reshape(-1) for view in views])
        if dtype is not None and not flat.is_complex():
            flat = flat.to(dtype)
        yield Bucket(members, flat, dist.all_reduce(flat, group=group, async_op=True))


@dataclass
class Reduction:
    """The reductions of one step on a rank.

    Attributes:
        slices: Those of all optimizers. What replicas divide in them is summed to its owners.
        buckets: All-reduces under way, by stage.
    """

    replicas: Replicas
    plan: SumPlan
    gradients: Gradients
    slices: Sequence[OptimizerParameters] = ()
    buckets: defaultdict[int, list[Bucket]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        """Zeroes gradients of earlier steps on all but the first rank, so that the sum counts them
        once. Raises PipelineError if a gradient would never be summed."""
        plan, partial, parameters = self.plan, self.replicas.partial, self.gradients.parameters
        self.divided = [slices for slices in self.slices if slices.zero]
        self.reduces = bool(plan.over or self.divided) and self.replicas.synchronise
        unsummed = [name for name in partial - plan.summed if parameters[name].grad is not None]
        if self.reduces and unsummed:
            raise PipelineError(
                f"inside no_sync, a batch trained {min(unsummed)}, which this batch does not train,"
                " so that its gradient would never be summed over the ranks. End no_sync with a"
                " batch that trains the same parameters."
            )
        for name in plan.summed - partial:
            if not plan.over[name].first and (gradient := parameters[name].grad) is not None:
                gradient.zero_()

    def start(self, stage: int) -> None:
        """Starts the sums of a stage's gradients.

        A parameter without a gradient here may have one on another replica, so zeros are sent.
        """
        for slices in self.divided:
            slices.reduce(stage, self.gradients)
        gradients = {}
        for name in self._undivided(self.plan.early[stage]):
            total = self.gradients[name].total()
            gradients[name] = self.gradients[name].buffer(stage) if total is None else total
        self._send(stage, gradients)

    def _send(self, stage: int, gradients: Mapping[str, Tensor]) -> None:
        by_route: dict[Route, list[Tensor]] = {}  # in one order on all ranks
        for name, gradient in gradients.items():
            if self.gradients.observe is not None:
                self.gradients.observe(name, gradient)
            by_route.setdefault(self._route(name), []).append(gradient)
        for route, members in by_route.items():
            self.buckets[stage] += sum_up(members, route)

    def finish_stage(self, stage: int | None = None) -> None:
        """Blocks until the sums of a stage, or with None of all stages, are complete."""
        for started in list(self.buckets) if stage is None else [stage]:
            for bucket in self.buckets.pop(started, ()):
                bucket.unpack()
        for slices in self.divided:
            slices.finish(stage)

    def finish(self) -> None:
        """Sums the gradients that several stages share, and completes all sums.

        Shared gradients are sent one by one. All ranks must add them in the same order, or their
        copies would differ.
        """
        self.replicas.partial = set() if self.reduces else self.replicas.partial | self.plan.summed
        if self.reduces:
            for slices in self.divided:
                slices.reduce(LATE, self.gradients)
            for name in self._undivided(self.plan.late):
                total = self.gradients[name].total()
                if total is not None:
                    self._send(LATE, {name: total})
        self.finish_stage()

    def _undivided(self, names: Sequence[str]) -> list[str]:
        return [
            name for name in names if not any(name in slices.local_names for slices in self.divided)
        ]

    def _route(self, name: str) -> Route:
        dtypes = [slices.reduce_dtype for slices in self.slices if name in slices.local_names]
        return self.plan.over[name].group, dtypes[0] if dtypes else None
