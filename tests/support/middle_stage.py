"""A module under test as the middle one of three stages, run pass by pass against eager autograd."""

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import zbcompile
from zbcompile.compiler.compile_stage import compile_stage
from zbcompile.passes.capture.export import Captured, capture
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.partition.liveness import Line, lay_out_line
from zbcompile.passes.partition.stage_graphs import Stage, cut
from zbcompile.passes.pass_list.passes_in_order import canonicalise
from zbcompile.passes.split.joint_graph import Joint, tangents_of, trace_joint
from zbcompile.passes.split.simplify import simplify
from zbcompile.passes.stage.deduplicate import compile_distinct
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.runtime.gradient_sums import Gradients
from zbcompile.runtime.stage_plan import CompiledStage, prepare_stage
from zbcompile.runtime.stage_run import StageRun

MICROBATCHES = 3
SEEDS = [zbcompile.microbatch_seed(0, i) for i in range(MICROBATCHES)]
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
    """`inner` between a layer that makes its input differentiable and one that turns its output into a loss."""

    def __init__(self, inner: nn.Module, like: Tensor) -> None:
        super().__init__()
        self.before = nn.ParameterList([nn.Parameter(torch.rand_like(like[:1]) + 0.5)])
        self.inner = inner
        self.after = nn.ParameterList([nn.Parameter(torch.tensor(0.7))])

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x * self.before[0])
        y = torch.view_as_real(y) if y.is_complex() else y
        return (y * torch.sin(y) * self.after[0]).sum()


@dataclass(frozen=True)
class Compiled:
    """Three compiled stages and the model that they were compiled from."""

    model: Middle
    eager: Middle
    inputs: list[Tensor]
    programs: tuple[StageProgram, ...]
    constants: Mapping[str, Tensor]

    @property
    def middle(self) -> StageProgram:
        return self.programs[1]


def compile_middle(inner: nn.Module, x: Tensor, choices: Choices | None = None) -> Compiled:
    """Compile `inner` as stage 1 of 3; `x` is one microbatch of its input."""
    model = Middle(inner, x)
    eager = copy.deepcopy(model)
    stages, captured = _stages(model, x)
    make = functools.partial(compile_stage, captured.trainable, choices or Choices(exact=True))
    inputs = [torch.randn_like(x) for _ in range(MICROBATCHES)]
    return Compiled(model, eager, inputs, compile_distinct(stages, captured.trainable, make), captured.constants)


def _assigned(line: Line) -> dict[torch.fx.Node, int]:
    """Stage 0 is the first operation; stage 1 goes on as far as operations are from `inner`."""
    inner = [i for i, node in enumerate(line.nodes) if "inner" in str(node.meta.get("nn_module_stack"))]
    return {node: 0 if not i else 1 if i <= max(inner, default=1) else 2 for i, node in enumerate(line.nodes)}


@torch.no_grad()
def run_in_order(compiled: Compiled, order: Sequence[tuple[str, int]]) -> dict[str, Tensor | None]:
    """The gradients after running the passes of all stages: an entry runs one pass of every stage."""
    parameters = dict(compiled.model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    runs = [
        StageRun([s] * MICROBATCHES, Gradients(parameters, frozenset(), Choices(exact=True)), *_inputs(compiled))
        for s in _prepared(compiled)
    ]
    for op, i in order:
        if op == "F":
            functools.reduce(lambda values, run: run.run("F", i, values), runs, list[Tensor]())
        elif op == "W":
            for run in runs:
                run.run("W", i, [])
        else:
            functools.reduce(lambda values, run: run.run(op, i, values), reversed(runs), list[Tensor]())
    for run in runs:
        run.check_empty()
    return {name: parameter.grad for name, parameter in parameters.items()}


def _inputs(compiled: Compiled) -> tuple[list[dict[str, Tensor]], Tensor, list[int]]:
    factor = torch.ones_like(compiled.eager(compiled.inputs[0]), requires_grad=False) / MICROBATCHES
    return [{"args[0]": x} for x in compiled.inputs], factor, SEEDS


def _prepared(compiled: Compiled) -> list[CompiledStage]:
    resident = {Slot("constant", name): tensor for name, tensor in compiled.constants.items()}
    resident |= {Slot("parameter", name): tensor for name, tensor in compiled.model.named_parameters()}
    resident |= {Slot("buffer", name): tensor for name, tensor in compiled.model.named_buffers()}
    return [prepare_stage(program, resident, torch.device("cpu"), -1) for program in compiled.programs]


def eager_gradients(compiled: Compiled) -> dict[str, Tensor | None]:
    """What eager gradient accumulation makes."""
    for x, seed in zip(compiled.inputs, SEEDS, strict=True):
        torch.manual_seed(seed)
        (compiled.eager(x) / MICROBATCHES).backward()
    return {name: parameter.grad for name, parameter in compiled.eager.named_parameters()}


def joint_of_middle(inner: nn.Module, x: Tensor) -> Joint:
    """The joint graph of `inner` as stage 1 of 3."""
    stages, captured = _stages(Middle(inner, x), x)
    last = trace_joint(stages[2], captured.trainable, tangents_of(stages[2], None), exact=True)
    tangents = tangents_of(stages[1], last.gradient_of_input)
    return simplify(trace_joint(stages[1], captured.trainable, tangents, exact=True))


def _stages(model: Middle, x: Tensor) -> tuple[tuple[Stage, ...], Captured]:
    captured = capture(model, (x,), {}, None, None)
    canonical = canonicalise(captured)
    line = lay_out_line(canonical)
    return cut(canonical, line, _assigned(line), 3), captured
