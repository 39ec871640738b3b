"""A module under test as the middle one of three stages, run pass by pass against eager
autograd."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.pass_graph_runner import Batch, Runner, differences, eager_step
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.compile_step import CompiledStep, compile_graph
from zbcompile.passes.partition.cut_points import ForwardLine
from zbcompile.passes.step_graph import StepGraph
from zbcompile.schedules.ir.actions import Action

MICROBATCHES, STAGES = 3, 3
# B then W at once, W after all other microbatches, and both in one.
ORDERS: Mapping[str, Sequence[tuple[str, int]]] = {
    "at once": [(op, i) for i in range(MICROBATCHES) for op in ("F", "B", "W")],
    "delayed": [
        *((op, i) for i in range(MICROBATCHES) for op in ("F", "B")),
        *(("W", i) for i in range(MICROBATCHES)),
    ],
    "fused": [(op, i) for i in range(MICROBATCHES) for op in ("F", "BW")],
}


class Middle(nn.Module):
    """`inner` between a layer that makes its input differentiable and one that turns its output
    into a loss."""

    def __init__(self, inner: nn.Module, like: Tensor) -> None:
        super().__init__()
        self.before = nn.ParameterList([nn.Parameter(torch.rand_like(like[:1]) + 0.5)])
        self.inner = inner
        self.after = nn.ParameterList([nn.Parameter(torch.tensor(0.7))])

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x * self.before[0])
        y = torch.view_as_real(y) if y.is_complex() else y
        return (y * torch.sin(y) * self.after[0]).sum()


def compile_middle(inner: nn.Module, x: Tensor, **options: Any) -> tuple[CompiledStep, Middle]:
    """Returns `inner` compiled as stage 1 of 3; `x` is one microbatch of its input."""
    model = Middle(inner, x)
    step = export_training_step(model, (x,), {})
    return (
        compile_graph(
            step, ranks_of=range(STAGES), exact=True, choose_cuts=_around_inner, **options
        ),
        model,
    )


def _around_inner(step: StepGraph, line: ForwardLine) -> tuple[int, int]:
    """Returns the cut before the first operation of `inner`, and the one after its last."""
    stacks = [str(node.meta.get("nn_module_stack")) for node in line.nodes]
    inner = [index for index, stack in enumerate(stacks) if "inner" in stack]
    first = max((cut for cut in line.cuts if cut <= min(inner)), default=line.cuts[0])
    after = [cut for cut in line.cuts if cut > max(first, *inner)]
    return first, after[0]


def differences_of_order(
    compiled: CompiledStep,
    model: Middle,
    batches: Sequence[Batch],
    order: Sequence[tuple[str, int]],
) -> list[str]:
    """Returns what differs from eager accumulation after every stage has run the passes in this
    order."""
    orders = [
        [Action(op, stage, microbatch) for op, microbatch in order] for stage in range(STAGES)
    ]
    result = Runner(compiled, model, batches, seed=3).run(orders)
    return differences(result, eager_step(model, batches, None, seed=3))
