"""Sums of gradients beside the pipeline: over replicas that train on different batches, and over the ranks of other
dimensions of the mesh that compute parts of a gradient.

The gradients of a stage are reduced as soon as its last W has run, while the remaining stages and ranks continue. The
factor 1/replicas of a mean loss enters as the tangent of the loss, like the 1/microbatches, so a reduction is a sum.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.mesh import Mesh
from zbcompile.distributed.packing import as_contiguous
from zbcompile.distributed.replicas import Replicas
from zbcompile.errors import PipelineError
from zbcompile.model.placements import PARTIAL, along
from zbcompile.program.program import Program
from zbcompile.runtime.gradient_buffers import Gradients
from zbcompile.runtime.sharded_updates import LATE, Sharded
from zbcompile.schedules.ir.actions import BW, Action, B, F, W, flatten

BUCKET_BYTES = 25 << 20  # small gradients travel together up to this size, as in DistributedDataParallel


@dataclass(frozen=True)
class Sum:
    """Over whom a gradient is summed; `first` says whether this rank is the first of them."""

    group: dist.ProcessGroup
    first: bool


def sums_of(program: Program, mesh: Mesh, rank: int) -> dict[str, Sum]:
    """The sums of the parameters that pipeline rank `rank` trains, by name, and of its buffers. Makes the groups."""
    names = [n for n, stages in program.homes.items() if set(stages) & set(program.stages_of(rank))]
    over = {name: along(program.placement(name), PARTIAL) for name in names}
    groups = {each: mesh.group(*each) for each in sorted(set(over.values()))}
    found = {name: (groups[each], mesh.index(*each) == 0) for name, each in over.items()}
    return {name: Sum(group, first) for name, (group, first) in found.items() if group is not None}


def start_reduction(
    replicas: Replicas,
    program: Program,
    rank: int,
    gradients: Gradients,
    sums: Mapping[str, Sum],
    sharded: Sequence[Sharded] = (),
) -> "Reduction":
    """The reductions of one step on pipeline rank `rank`. `sums` has the parameters whose gradients are summed; of
    those that are `sharded` each replica gets its part of the sum."""
    stages = {stage: program.stages[stage].trained for stage in program.stages_of(rank)}
    rows = frozenset(() if program.vocabulary is None else program.vocabulary.parameters)
    late = program.shared | rows  # complete at the end of the step only
    names = {stage: [name for name in found if name in sums and name not in late] for stage, found in stages.items()}
    held = {name for found in stages.values() for name in found}
    shared = sorted(name for name in rows | program.shared & held if name in sums)
    reduces = bool(sums or sharded) and replicas.synchronise
    summed = {name for found in (*names.values(), shared) for name in found}
    if reduces:
        _require_all(name for name in replicas.partial - summed if gradients.parameters[name].grad is not None)
    _clear(gradients.parameters[name] for name in summed - replicas.partial if not sums[name].first)
    hooks = _last_backwards(program, rank) if reduces else {}
    return Reduction(replicas, gradients, names, shared, {a: s for s, a in hooks.items()}, reduces, sums, sharded)


def _require_all(parts: Iterable[str]) -> None:
    """Refuse a step that would leave parts unsummed."""
    left = sorted(parts)
    if left:
        raise PipelineError(
            f"inside no_sync, a batch trained {left[0]}, which this batch does not train, so that its gradient would "
            "never be summed over the ranks. End no_sync with a batch that trains the same parameters."
        )


def _clear(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()


def _last_backwards(program: Program, rank: int) -> dict[int, Action]:
    """The action of each stage after which its gradients are complete."""
    return {a.stage: a for a in flatten(program.lowered.programs[rank]) if a.op in (B, W, BW)}


@dataclass
class Bucket:
    """Gradients being reduced, in the dtype in which they were summed: `flat` is a single one itself, or a copy of
    several."""

    gradients: Sequence[torch.Tensor]
    flat: torch.Tensor
    work: dist.Work | None

    def finish(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.flat.data_ptr() != self.gradients[0].data_ptr():
            parts = self.flat.split([gradient.numel() for gradient in self.gradients])
            for gradient, part in zip(self.gradients, parts, strict=True):
                target = as_contiguous(gradient)
                target.copy_(part.view(target.shape))


@dataclass
class Reduction:
    """The reductions of one step. `last[action]` is the stage whose gradients are complete after `action`. `observe`
    sees what this rank contributes to each sum."""

    replicas: Replicas
    gradients: Gradients
    names: Mapping[int, Sequence[str]]
    shared: Sequence[str]
    last: Mapping[Action, int]
    reduces: bool
    sums: Mapping[str, Sum]
    sharded: Sequence[Sharded] = ()
    buckets: list[Bucket] = field(default_factory=list)
    observe: Callable[[str, torch.Tensor], None] = lambda name, part: None

    @property
    def hooks(self) -> dict[Action, Callable[[], None]]:
        """The functions to call after actions."""
        return {action: partial(self.start, stage) for action, stage in self.last.items()}

    def arrivals(self, program: Program, rank: int) -> dict[Action, Callable[[], None]]:
        """The functions to call before actions: a stage's first one waits for the parameters of its last update."""
        first = {a.stage: a for a in reversed(flatten(program.lowered.programs[rank])) if a.op == F}
        return {action: partial(self._arrive, stage) for stage, action in first.items()} if self.sharded else {}

    def _arrive(self, stage: int) -> None:
        for each in self.sharded:
            each.arrive(stage)

    def start(self, stage: int) -> None:
        """Begin to reduce a stage's gradients; returns at once. What no microbatch here trained, those of another
        replica did: it takes part with zeros."""
        for each in self.sharded:
            each.scatter(stage, self.gradients, self.observe)
        names = sorted(self._whole(self.names[stage]), key=lambda name: self.order[self._group(name)])
        for group, found in groupby(names, key=self._group):
            parts = (self._part(name, stage) for name in found)
            self.buckets.extend(_send(part, group) for part in in_buckets(parts))

    def _part(self, name: str, stage: int) -> torch.Tensor:
        own = self.gradients.whole_sum(name)
        part = self.gradients.buffer(name, stage) if own is None else own
        self.observe(name, part)
        return part

    def finish(self) -> None:
        """Reduce what several stages share, and wait for everything.

        Shared gradients are sent alone: their holders must add in the same order, or they would drift apart.
        """
        summed = {name for found in (*self.names.values(), self.shared) for name in found}
        self.replicas.partial = set() if self.reduces else self.replicas.partial | summed
        for each in self.sharded if self.reduces else ():
            each.scatter(LATE, self.gradients, self.observe)
        for name in self._whole(self.shared) if self.reduces else ():
            found = self.gradients.whole_sum(name)
            if found is not None:
                self.observe(name, found)
                self.buckets.append(_send([found], self._group(name)))
        for bucket in self.buckets:
            bucket.finish()
        self.buckets.clear()
        for each in self.sharded:
            each.finish()

    def results(self) -> dict[str, torch.Tensor | None]:
        """The gradients that this rank has after the step, whole or its part."""
        whole = {name: parameter.grad for name, parameter in self.gradients.parameters.items()}
        return whole | {name: part for each in self.sharded for name, part in each.sums().items()}

    def _whole(self, names: Sequence[str]) -> list[str]:
        """Those of which every replica gets the whole sum."""
        return [name for name in names if not any(name in each.names for each in self.sharded)]

    def _group(self, name: str) -> dist.ProcessGroup:
        return self.sums[name].group

    @cached_property
    def order(self) -> dict[dist.ProcessGroup, int]:
        """The groups, numbered as all of their ranks do: as the parameters come."""
        return {group: i for i, group in enumerate(dict.fromkeys(each.group for each in self.sums.values()))}


def _send(gradients: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Bucket:
    flat = _flatten(gradients)
    return Bucket(gradients, flat, dist.all_reduce(flat, group=group, async_op=True))


def in_buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Consecutive gradients of one type, grouped up to the size of a bucket."""
    for _, group in groupby(gradients, key=lambda gradient: gradient.dtype):
        bucket: list[torch.Tensor] = []
        for gradient in group:
            if bucket and sum(g.nbytes for g in bucket) + gradient.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(gradient)
        yield bucket


def _flatten(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = [as_contiguous(gradient) for gradient in gradients]
    if len(whole) == 1 and whole[0].is_contiguous():
        return whole[0]
    return torch.cat([gradient.reshape(-1) for gradient in whole])
