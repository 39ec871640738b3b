"""Gradients of parameters that several stages, or two model copies, train.

They are added when all passes of a step have run. Eager autograd adds the uses of a parameter per
microbatch, the last use first, and accumulates the sums in microbatch order. With `exact=True` a
graph that the compiler extracted adds the parts of each microbatch in that order. Otherwise every
stage has one sum; these are added from the last stage to the first.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist

from zbcompile.distributed.ranks import Ranks
from zbcompile.distributed.transport import laid_out
from zbcompile.engine.gradients import Gradients
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.stage_program import tensor_spec
from zbcompile.passes.torch_private import boxed
from zbcompile.program.program import Program

LocalGradients = Mapping[int, Gradients]  # of the ranks of this process


def reduce_tied(program: Program, ranks: Ranks, gradients: LocalGradients) -> None:
    """Adds the gradients of every shared parameter on all ranks that hold it. All ranks call it."""
    reducer = _Reducer(program, ranks, gradients)
    names = [name for graph in program.ends.values() for _, name in graph.outputs]
    for stage, graph in sorted(program.ends.items()):
        reducer.run_graph(stage, graph)
    for name in sorted(program.shared.difference(names)):
        reducer.add_stages(name)


class _Reducer:
    def __init__(self, program: Program, ranks: Ranks, gradients: LocalGradients) -> None:
        self.program, self.ranks, self.gradients = program, ranks, gradients

    def run_graph(self, stage: int, graph: PassGraph) -> None:
        """Runs the graph that adds the parts of gradients, for one microbatch after the other."""
        program, run = self.program, boxed(graph.module).forward
        senders = {name: stage.stage for stage in program.stages for name in stage.parts}
        for microbatch in range(program.schedule.microbatches):
            owner = program.rank_of(stage, microbatch)
            values = []
            for (_, name), node in graph.arguments:
                source = program.rank_of(senders[name], microbatch)
                part = None
                if source in self.gradients:
                    part = self.gradients[source].parts[name].pop(microbatch)
                values.append(self._move(part, node.meta["val"], source, owner))
            sums: Sequence[torch.Tensor | None] = [None] * len(graph.outputs)
            if owner in self.gradients:
                sums = run(values)
            for (_, name), node, total in zip(graph.outputs, graph.results, sums, strict=True):
                self._share(name, node.meta["val"], total, owner)

    def add_stages(self, name: str) -> None:
        """Adds the sums of the stages. Of two model copies (DualPipe) the first has the lower
        microbatches, so its sums come first."""
        program, schedule = self.program, self.program.schedule
        local = [rank for rank in program.holders(name) if rank in self.gradients]
        if not local:
            return
        sum_here = self.gradients[local[0]][name]
        like = torch.empty_like(sum_here.parameter, dtype=sum_here.dtype_of_parts, device="meta")
        stages = [stage.stage for stage in reversed(program.stages) if name in stage.trained]
        per_copy = schedule.microbatches // program.copies
        for first in range(0, schedule.microbatches, per_copy):
            owner = program.rank_of(stages[-1], first)
            for microbatch in range(first, first + per_copy) if program.exact else [None]:
                parts = list[torch.Tensor]()
                for stage in stages:
                    source = program.rank_of(stage, first)
                    part = None
                    if source in self.gradients:
                        part = self.gradients[source][name].take_part(stage, microbatch)
                    if (moved := self._move(part, like, source, owner)) is not None:
                        parts.append(moved)
                total = reduce(torch.add, parts) if parts else None
                self._share(name, like, total, owner)

    def _share(self, name: str, like: torch.Tensor, total: torch.Tensor | None, owner: int) -> None:
        """Accumulates a gradient in every process that holds its parameter."""
        holders = sorted(self.program.holders(name))
        copies = [self._move(total, like, owner, holder) for holder in holders]
        for holder, gradient in zip(holders, copies, strict=True):
            if gradient is not None:  # once in a process
                self.gradients[holder][name].accumulate(gradient)
                return

    def _move(
        self, value: torch.Tensor | None, like: torch.Tensor, source: int, destination: int
    ) -> torch.Tensor | None:
        """Returns the value on rank `destination`, None in other processes."""
        if destination in self.gradients:
            if source in self.gradients:
                return value
            received = torch.empty(like.shape, dtype=like.dtype, device=self.ranks.device)
            dist.recv(received, group=self.ranks.group, group_src=source)
            return laid_out(received, tensor_spec(like))
        if value is not None:
            dist.send(value.contiguous(), group=self.ranks.group, group_dst=destination)
        return None
