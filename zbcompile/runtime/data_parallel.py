"""Data parallelism beside the pipeline: replicas of it train on different batches and sum their gradients.

The gradients of a stage are reduced as soon as its last W has run, while the remaining stages and ranks continue. The
factor 1/replicas of a mean loss enters as the tangent of the loss, like the 1/microbatches, so a reduction is a sum.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.packing import as_contiguous
from zbcompile.distributed.replicas import Replicas
from zbcompile.program.program import Program
from zbcompile.runtime.gradient_buffers import Gradients
from zbcompile.schedules.ir.actions import BW, Action, B, W, flatten

BUCKET_BYTES = 25 << 20  # small gradients travel together up to this size, as in DistributedDataParallel


def start_reduction(replicas: Replicas, program: Program, rank: int, gradients: Gradients) -> "Reduction":
    """The reductions of one step on pipeline rank `rank`."""
    stages = {stage: program.stages[stage].trained for stage in program.stages_of(rank)}
    sharded = frozenset(() if program.vocabulary is None else program.vocabulary.parameters)
    late = program.shared | sharded  # complete at the end of the step only
    names = {stage: [name for name in found if name not in late] for stage, found in stages.items()}
    shared = sorted(sharded | program.shared & {name for found in stages.values() for name in found})
    if replicas.count > 1 and replicas.rank and not replicas.partial:
        _clear(gradients.parameters[name] for found in (*names.values(), shared) for name in found)
    reduces = replicas.count > 1 and replicas.synchronise
    hooks = _last_backwards(program, rank) if reduces else {}
    return Reduction(replicas, gradients, names, shared, {a: s for s, a in hooks.items()}, reduces)


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
    """The reductions of one step. `last[action]` is the stage whose gradients are complete after `action`."""

    replicas: Replicas
    gradients: Gradients
    names: Mapping[int, Sequence[str]]
    shared: Sequence[str]
    last: Mapping[Action, int]
    reduces: bool
    buckets: list[Bucket] = field(default_factory=list)

    @property
    def hooks(self) -> dict[Action, Callable[[], None]]:
        """The functions to call after actions."""
        return {action: partial(self.start, stage) for action, stage in self.last.items()}

    def start(self, stage: int) -> None:
        """Begin to reduce a stage's gradients; returns at once."""
        sums = map(self.gradients.whole_sum, self.names[stage])
        self.buckets.extend(map(self._send, in_buckets(found for found in sums if found is not None)))

    def finish(self) -> None:
        """Reduce what several stages share, and wait for everything.

        Shared gradients are sent alone: their holders must add in the same order, or they would drift apart.
        """
        self.replicas.partial = not self.reduces and self.replicas.count > 1
        if self.reduces:
            sums = map(self.gradients.whole_sum, self.shared)
            self.buckets.extend(self._send([found]) for found in sums if found is not None)
        for bucket in self.buckets:
            bucket.finish()
        self.buckets.clear()

    def _send(self, gradients: Sequence[torch.Tensor]) -> Bucket:
        flat = _flatten(gradients)
        return Bucket(gradients, flat, dist.all_reduce(flat, group=self.replicas.group, async_op=True))


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
