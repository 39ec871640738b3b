"""The end of a step: gradients of parameters that several stages train are summed, and every rank learns the losses.

Eager autograd adds the uses of a parameter per microbatch, the last use first, and then accumulates the sums in
microbatch order. So the stages' gradients are added from the last stage to the first and folded at the end. Of two
model copies (DualPipe) the first has the lower microbatches: its sums are folded first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zbcompile.distributed.ranks import GroupRanks
from zbcompile.distributed.termination import outlives_its_step
from zbcompile.passes.torch_names import dtype_named
from zbcompile.program.program import Program
from zbcompile.runtime.gradient_sums import WHOLE, Gradients, add_uses


@dataclass(frozen=True)
class Walk:
    """How the gradients of a shared parameter are summed for one model copy: `stages` that train it, the last first,
    on `ranks`, for `microbatches`: a gradient is one tensor per microbatch in exact mode, else one of the WHOLE."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    microbatches: Sequence[int]


def walks(program: Program, name: str) -> list[Walk]:
    """One walk per model copy, in the order in which their sums accumulate."""
    stages = tuple(stage.stage for stage in reversed(program.stages) if name in stage.trained)
    per_copy = program.schedule.microbatches // program.copies
    copies = [range(first, first + per_copy) for first in range(0, program.schedule.microbatches, per_copy)]
    return [
        Walk(stages, tuple(program.rank_of(s, each[0]) for s in stages), each if program.exact else (WHOLE,))
        for each in copies
    ]


def sum_shared_in_process(program: Program, gradients: Sequence[Gradients]) -> None:
    """All ranks are here: add the uses from the last stage to the first and accumulate once."""
    for name in sorted(program.shared):
        for walk in walks(program, name):
            total: list[torch.Tensor] = []
            for stage, rank in zip(walk.stages, walk.ranks, strict=True):
                total = add_uses(total, gradients[rank][name].take(stage, walk.microbatches))
            gradients[0][name].fold(total)


def sum_shared(program: Program, gradients: Gradients, rank: int, group: dist.ProcessGroup) -> None:
    """The running sum walks from the rank of the last use to that of the first, which gives all holders the total."""
    link = _Link(gradients, rank, group)
    for name in sorted(program.shared):
        holders = sorted(program.holders(name))
        if rank in holders:
            totals = [link.share(name, walk, link.walk(name, walk), holders) for walk in walks(program, name)]
            for total in totals:
                gradients[name].fold(total)


@dataclass(frozen=True)
class _Link:
    """One rank's part in the sums."""

    gradients: Gradients
    rank: int
    group: dist.ProcessGroup

    def walk(self, name: str, walk: Walk) -> list[torch.Tensor]:
        """Take part in the walk; the rank of the first use ends with the total, other ranks with an empty list."""
        running: list[torch.Tensor] = []
        before = walk.ranks[0]
        for stage, here in zip(walk.stages, walk.ranks, strict=True):
            if here != before and self.rank == before:
                self._send(running, here)
                running = []
            if self.rank == here:
                running = self._receive(name, before, len(walk.microbatches)) if here != before else running
                running = add_uses(running, self.gradients[name].take(stage, walk.microbatches))
            before = here
        return running

    def share(self, name: str, walk: Walk, total: list[torch.Tensor], holders: Sequence[int]) -> list[torch.Tensor]:
        """The total, on every holder."""
        owner = walk.ranks[-1]
        if self.rank != owner:
            return self._receive(name, owner, len(walk.microbatches))
        for holder in holders:
            if holder != owner:
                self._send(total, holder)
        return total

    def _send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        for tensor in tensors:
            dist.send(tensor.contiguous(), group=self.group, group_dst=to)

    def _receive(self, name: str, source: int, count: int) -> list[torch.Tensor]:
        like, dtype = self.gradients.parameters[name], self.gradients[name].dtype_of_parts
        buffers = [torch.empty(like.shape, dtype=dtype, device=like.device) for _ in range(count)]
        for buffer in buffers:
            dist.recv(buffer, group=self.group, group_src=source)
        return buffers


def share_losses(
    program: Program, own: Mapping[int, torch.Tensor], ranks: GroupRanks, news: bool = False
) -> tuple[torch.Tensor, torch.Tensor, dist.Work]:
    """Begin to give every rank the loss of every microbatch of all replicas, as every rank along "tp" computed it: a
    tensor [replicas x microbatches, tp]. Beside it, how many ranks have `news`, on the device.

    Each has one owner and the other ranks add zeros, which changes no bit. Whoever waits does not end its step before
    all have run their passes, and so does not update its parameters although another rank has failed.
    """
    count, mesh = program.schedule.microbatches, ranks.mesh
    shape = (ranks.replicas.count * count + 1, mesh.size("tp"))
    shared = torch.zeros(shape, dtype=dtype_named(program.loss_dtype), device=ranks.device)
    for microbatch, loss in own.items():
        shared[ranks.replicas.rank * count + microbatch, mesh.index("tp")].copy_(loss)
    shared[-1] += news
    work = dist.all_reduce(shared, group=ranks.everyone, async_op=True)
    return shared[:-1], shared[-1, 0], outlives_its_step(work)
