"""The sums of weight gradients during a step.

The graphs of B, W and BW add to them (`zbcompile.passes.stage.accumulate`); with `exact=True` this
module does. If one stage trains a parameter, its passes add straight into `.grad`, or, if the dtype
or the strides differ, into a buffer that `flush` rounds once. If several stages, or two model
copies, train it, each has a separate sum until all passes of the step have run. Eager autograd adds
the uses of a parameter per microbatch, the last use first, and accumulates the sums in microbatch
order. With `exact=True` a graph that the compiler extracted adds the parts of each microbatch in
that order. Otherwise every stage has one sum; these are added from the last stage to the first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.distributed.transport import laid_out
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.stage_program import tensor_spec
from zbcompile.passes.torch_private import boxed, gradient_dtype
from zbcompile.program.program import Program


@dataclass
class GradientSum:
    """One parameter's gradient on one rank.

    Attributes:
        dtype: That of sums over microbatches.
        shared: Whether several stages train the parameter, on this rank or others.
        running: The sum, if it is not `.grad` itself.
        parts: Of a shared parameter, the gradient by stage and microbatch with `exact=True`, else
            the sum of a stage, with None for the microbatch.
    """

    parameter: nn.Parameter
    dtype: torch.dtype
    exact: bool = False
    shared: bool = False
    running: Tensor | None = None
    parts: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def buffer(self, stage: int) -> Tensor:
        """Returns what the passes of a stage add into; zeros at first."""
        parameter, grad = self.parameter, self.parameter.grad
        if self.shared:
            if (stage, None) not in self.parts:
                self.parts[stage, None] = self._zeros()
            return self.parts[stage, None]
        strided = grad is not None and grad.stride() != parameter.stride()
        if strided or self.dtype != gradient_dtype(parameter):
            if self.running is None:
                self.running = self._zeros()
            return self.running
        if grad is None:
            grad = parameter.grad = self._zeros()
        return grad

    def _zeros(self) -> Tensor:
        return torch.zeros_like(self.parameter, dtype=self.dtype, requires_grad=False)

    @property
    def dtype_of_parts(self) -> torch.dtype:
        return gradient_dtype(self.parameter) if self.exact else self.dtype

    def add(self, stage: int, microbatch: int, gradient: Tensor) -> None:
        """Adds one microbatch's gradient as eager does, which casts it to the dtype of `.grad`."""
        gradient = gradient.to(gradient_dtype(self.parameter))
        if self.shared:
            self.parts[stage, microbatch] = gradient
        else:
            self.accumulate(gradient)

    def take_part(self, stage: int, microbatch: int | None) -> Tensor:
        """Removes and returns a part; of a stage that did not train the parameter, -0.0, which
        changes no bit of what it is added to."""
        if (part := self.parts.pop((stage, microbatch), None)) is not None:
            return part
        dtype = self.dtype_of_parts
        return torch.full_like(self.parameter, -0.0, dtype=dtype, requires_grad=False)

    def accumulate(self, gradient: Tensor) -> None:
        """Adds a gradient that is complete, of one microbatch or of all."""
        dtype = gradient_dtype(self.parameter)
        if torch.promote_types(self.dtype, dtype) == dtype:
            self._add_to_grad(gradient)
        elif self.running is None:
            self.running = self._zeros().add_(gradient)
        else:
            self.running.add_(gradient)

    def _add_to_grad(self, gradient: Tensor) -> None:
        """Adds to `.grad` with the parameter's strides; the first gradient becomes `.grad`."""
        parameter, dtype = self.parameter, gradient_dtype(self.parameter)
        with torch.no_grad():
            if parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif gradient.stride() == parameter.stride():
                parameter.grad = gradient.to(dtype)
            else:
                parameter.grad = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                parameter.grad.copy_(gradient)

    def total(self) -> Tensor | None:
        """Returns the sum so far in its dtype, with what `.grad` was before the step."""
        if self.running is None:
            return self.parameter.grad
        if self.parameter.grad is not None:
            self.running.add_(self.parameter.grad)
            self.parameter.grad.zero_()
        return self.running

    def release(self) -> None:
        """Drops the sum, which replicas have reduced elsewhere."""
        self.running = self.parameter.grad = None

    def flush(self) -> None:
        """Adds the sum to `.grad`, rounded to its dtype once."""
        running, self.running = self.running, None
        if running is not None:
            self._add_to_grad(running)


class Gradients(dict[str, GradientSum]):
    """The sums of one rank by parameter, created at first use; all are empty between steps.

    Attributes:
        shared: The parameters of several stages.
        parts: With `exact=True` the parts of gradients that several stages compute, by name and
            microbatch.
        observe: Called with what this rank adds to the sum of a gradient over other ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shared: frozenset[str],
        choices: CompileOptions,
    ) -> None:
        super().__init__()
        self.parameters, self.shared, self.choices = parameters, shared, choices
        self.parts: dict[str, dict[int, Tensor]] = {}
        self.observe: Callable[[str, Tensor], None] | None = None

    def __missing__(self, name: str) -> GradientSum:
        parameter, choices = self.parameters[name], self.choices
        # With exact=True that of `.grad`, in which eager adds, also if it is narrower.
        like = gradient_dtype(parameter) if choices.exact else parameter.dtype
        dtype = choices.dtype_of_sum(like)
        self[name] = GradientSum(parameter, dtype, choices.exact, name in self.shared)
        return self[name]

    def flush(self, names: Iterable[str] | None = None) -> None:
        """Adds the sums of `names`, or of all parameters, to `.grad`."""
        for name in list(self) if names is None else names:
            if name in self:
                self[name].flush()


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
            sums: Sequence[Tensor | None] = [None] * len(graph.outputs)
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
                parts = list[Tensor]()
                for stage in stages:
                    source = program.rank_of(stage, first)
                    part = None
                    if source in self.gradients:
                        part = self.gradients[source][name].take_part(stage, microbatch)
                    if (moved := self._move(part, like, source, owner)) is not None:
                        parts.append(moved)
                total = reduce(torch.add, parts) if parts else None
                self._share(name, like, total, owner)

    def _share(self, name: str, like: Tensor, total: Tensor | None, owner: int) -> None:
        """Accumulates a gradient in every process that holds its parameter."""
        holders = sorted(self.program.holders(name))
        copies = [self._move(total, like, owner, holder) for holder in holders]
        for holder, gradient in zip(holders, copies, strict=True):
            if gradient is not None:  # once in a process
                self.gradients[holder][name].accumulate(gradient)
                return

    def _move(
        self, value: Tensor | None, like: Tensor, source: int, destination: int
    ) -> Tensor | None:
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
