"""The sum of the gradients of a parameter that several stages, or two model copies, train.

Eager autograd adds the uses of a parameter per microbatch, the last use first, and then accumulates
the sums in microbatch order. So the stages' gradients are added from the last stage to the first,
before they are folded. Of two model copies (DualPipe) the first has the lower microbatches: its
sums are folded first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zbcompile.distributed.packing import laid_out
from zbcompile.distributed.ranks import Ranks
from zbcompile.engine.gradients import WHOLE, Gradients, add_uses
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.stage_program import tensor_spec
from zbcompile.passes.torch_private import boxed
from zbcompile.program.program import Program


@dataclass(frozen=True)
class Walk:
    """How the gradients of a shared parameter are summed for one model copy: `stages` that train
    it, the last first, on `ranks`, for `microbatches`: a gradient is one tensor per microbatch in
    exact mode, else one of the WHOLE.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    microbatches: Sequence[int]


def walks(program: Program, name: str) -> list[Walk]:
    """One walk per model copy, in the order in which their sums accumulate."""
    stages = tuple(stage.stage for stage in reversed(program.stages) if name in stage.trained)
    per_copy = program.schedule.microbatches // program.copies
    copies = [
        range(first, first + per_copy)
        for first in range(0, program.schedule.microbatches, per_copy)
    ]
    return [
        Walk(
            stages,
            tuple(program.rank_of(s, each[0]) for s in stages),
            each if program.exact else (WHOLE,),
        )
        for each in copies
    ]


@dataclass(frozen=True)
class TiedSums:
    """The exchange of one step: `gradients` are those of this process's ranks.

    The running sum walks from the rank of the last use to that of the first, which gives all
    holders the total.
    """

    program: Program
    ranks: Ranks
    gradients: Mapping[int, Gradients]

    def run(self) -> None:
        """Fold the total of every shared parameter, in the processes of its holders."""
        added = self._add_parts()
        for name in sorted(self.program.shared - added):
            holders = sorted(self.program.holders(name))
            totals = [
                self._share(name, walk, self._walk(name, walk), holders)
                for walk in walks(self.program, name)
            ]
            own = next(
                (self.gradients[rank][name] for rank in self.gradients if rank in holders), None
            )
            if own is not None:
                own.fold(gradient for total in totals for gradient in total)

    def _add_parts(self) -> set[str]:
        """Adds the parts of gradients that several stages compute, in autograd's order, and returns
        their names.

        The graphs in `ends` do it, for one microbatch after the other."""
        program, added = self.program, set[str]()
        makers = {name: stage.stage for stage in program.stages for name in stage.parts}
        for stage, piece in sorted(program.ends.items()):
            names = [slot.name for slot in piece.outputs]
            added.update(names)
            holders = {name: set(program.holders(name)) & self.gradients.keys() for name in names}
            for microbatch in range(program.schedule.microbatches):
                owner = program.rank_of(stage, microbatch)
                values = self._parts_at(owner, piece, makers, microbatch)
                sums = (
                    boxed(piece.module).forward(values)
                    if owner in self.gradients
                    else [None] * len(names)
                )
                for name, node, gradient in zip(
                    names, output_values(piece.module.graph), sums, strict=True
                ):
                    total = self._to_holders(name, node.meta["val"], gradient, owner)
                    for rank in list(holders[name])[:1]:
                        assert total is not None
                        self.gradients[rank][name].fold([total])
        return added

    def _parts_at(
        self, owner: int, piece: PassGraph, makers: Mapping[str, int], microbatch: int
    ) -> list[torch.Tensor]:
        """The parts of one microbatch on the rank that adds them; an empty list on other ranks."""
        values = []
        for node, slot in zip(
            piece.module.graph.find_nodes(op="placeholder"), piece.inputs, strict=True
        ):
            source = self.program.rank_of(makers[slot.name], microbatch)
            value = (
                self.gradients[source].parts[slot.name].pop(microbatch)
                if source in self.gradients
                else None
            )
            value = self._moved(value, node.meta["val"], source, owner)
            if value is not None:
                values.append(value)
        return values

    def _to_holders(
        self, name: str, like: torch.Tensor, gradient: torch.Tensor | None, owner: int
    ) -> torch.Tensor | None:
        """The gradient in every process that holds its parameter."""
        total = gradient
        for holder in sorted(self.program.holders(name)):
            moved = self._moved(gradient, like, owner, holder)
            total = moved if moved is not None else total
        return total

    def _moved(
        self, value: torch.Tensor | None, like: torch.Tensor, source: int, destination: int
    ) -> torch.Tensor | None:
        """The value on rank `destination`, None in other processes; from its process if that is
        another one."""
        if destination in self.gradients:
            if source in self.gradients:
                return value
            found = torch.empty(like.shape, dtype=like.dtype, device=self.ranks.device)
            dist.recv(found, group=self.ranks.group, group_src=source)
            return laid_out(found, tensor_spec(like))
        if source in self.gradients:
            assert value is not None
            dist.send(value.contiguous(), group=self.ranks.group, group_dst=destination)
        return None

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

    def _share(
        self, name: str, walk: Walk, total: list[torch.Tensor], holders: Sequence[int]
    ) -> list[torch.Tensor]:
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
        buffers = [
            torch.empty(like.shape, dtype=dtype, device=like.device) for _ in walk.microbatches
        ]
        for buffer in buffers:
            dist.recv(buffer, group=self.ranks.group, group_src=source)
        return buffers
