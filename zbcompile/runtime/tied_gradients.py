"""The sum of the gradients of a parameter that several stages, or two model copies, train.

Eager autograd adds the uses of a parameter per microbatch, the last use first, and then accumulates the sums in
microbatch order. So the stages' gradients are added from the last stage to the first, before they are folded. Of two
model copies (DualPipe) the first has the lower microbatches: its sums are folded first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zbcompile.distributed.ranks import Ranks
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


@dataclass(frozen=True)
class TiedSums:
    """The exchange of one step: `gradients` are those of this process's ranks.

    The running sum walks from the rank of the last use to that of the first, which gives all holders the total.
    """

    program: Program
    ranks: Ranks
    gradients: Mapping[int, Gradients]

    def run(self) -> None:
        """Fold the total of every shared parameter, in the processes of its holders."""
        for name in sorted(self.program.shared):
            holders = sorted(self.program.holders(name))
            totals = [self._share(name, walk, self._walk(name, walk), holders) for walk in walks(self.program, name)]
            own = next((self.gradients[rank][name] for rank in self.gradients if rank in holders), None)
            if own is not None:
                own.fold(gradient for total in totals for gradient in total)

    def _walk(self, name: str, walk: Walk) -> list[torch.Tensor]:
        """The total, on the rank of the first use; other processes end with an empty list."""
        running: list[torch.Tensor] = []
        before, local = walk.ranks[0], self.gradients
        for stage, here in zip(walk.stages, walk.ranks, strict=True):
            if before in local and here not in local:
                self._send(running, here)
                running = []
            if here in local:
                running = running if before in local else self._receive(name, before, walk)
                running = add_uses(running, local[here][name].take(stage, walk.microbatches))
            before = here
        return running

    def _share(self, name: str, walk: Walk, total: list[torch.Tensor], holders: Sequence[int]) -> list[torch.Tensor]:
        """The total, in the processes of all holders."""
        owner, local = walk.ranks[-1], self.gradients
        if owner not in local:
            return self._receive(name, owner, walk) if local.keys() & set(holders) else []
        for holder in holders:
            if holder not in local:
                self._send(total, holder)
        return total

    def _send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        for tensor in tensors:
            dist.send(tensor.contiguous(), group=self.ranks.group, group_dst=to)

    def _receive(self, name: str, source: int, walk: Walk) -> list[torch.Tensor]:
        (gradients,) = self.gradients.values()
        like, dtype = gradients[name].parameter, gradients[name].dtype_of_parts
        buffers = [torch.empty(like.shape, dtype=dtype, device=like.device) for _ in walk.microbatches]
        for buffer in buffers:
            dist.recv(buffer, group=self.ranks.group, group_src=source)
        return buffers
