"""Runs the pass graphs of a compiled training step in one process, in the order of a schedule, and
compares the results with eager mode bit for bit."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from zbcompile import schedules
from zbcompile.passes.capture.batch_inputs import leaves_with_paths
from zbcompile.passes.capture.export import ExportOptions, export_training_step
from zbcompile.passes.compile_step import CompiledStep, compile_graph
from zbcompile.passes.graph import roles
from zbcompile.passes.graph.process_groups import with_process_groups
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.step_graph import END, Label, StepGraph
from zbcompile.schedules.ir.actions import flatten

Batch = tuple[tuple[Any, ...], dict[str, Any], Any]  # args, kwargs, target


@dataclass
class StepResult:
    """Losses, gradients and buffers of a step over several microbatches."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Runner:
    """Executes the actions of all ranks, each as soon as its inputs are there."""

    def __init__(
        self, compiled: CompiledStep, model: nn.Module, batches: Sequence[Batch], seed: int = 0
    ) -> None:
        self.compiled, self.batches, self.seed = compiled, batches, seed
        self.paths = [dict(leaves_with_paths(batch)) for batch in batches]
        self.resident: dict[roles.Slot, Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.resident[roles.Slot(roles.PARAMETER, name)] = local(parameter.detach())
        for name, buffer in model.named_buffers(remove_duplicate=False):
            self.resident[roles.Slot(roles.BUFFER, name)] = local(buffer.detach().clone())
        for name, value in compiled.step.constant_values.items():
            self.resident[roles.Slot(roles.CONSTANT, name)] = value
        self.values: dict[tuple[int, int, roles.Slot], Tensor] = {}  # microbatch, stage, slot
        self.generators: dict[tuple[int, int], Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        self.sums: dict[tuple[int, str], Tensor] = {}  # -stage, name
        self.outputs: dict[int, dict[int, Tensor]] = {}
        self.modules: dict[str, Any] = {}

    def run(self, orders: Sequence[Sequence[Any]]) -> StepResult:
        pending = [list(flatten(order)) for order in orders]
        while any(pending):
            progress = False
            for order in pending:
                while order and self._is_ready(order[0]):
                    action = order.pop(0)
                    for graph in self._graphs(action):
                        self._run_pass(graph, action.microbatch)
                    progress = True
            assert progress, f"deadlock before {[order[0] for order in pending if order]}"
        for microbatch in range(len(self.batches)):
            for label, graph in self.compiled.passes.items():
                if label.kind == END:
                    self._run_pass(graph, microbatch)
        assert not self.values, f"values that no pass has read: {list(self.values)[:5]}"
        gradients: dict[str, Tensor] = {}
        for (_, name), value in sorted(self.sums.items()):
            gradients[name] = gradients[name] + value if name in gradients else value
        buffers = {slot.name: v for slot, v in self.resident.items() if slot.role == roles.BUFFER}
        losses = [self.losses[i] for i in sorted(self.losses)]
        return StepResult(losses, gradients, buffers)

    def _graphs(self, action: Any) -> list[PassGraph]:
        if action.op == "BW":
            return [self.compiled.fused[action.stage]]
        label = Label(action.stage, action.op)
        return [self.compiled.passes[label]] if label in self.compiled.passes else []

    def _is_ready(self, action: Any) -> bool:
        return all(
            (action.microbatch, action.stage, slot) in self.values
            for graph in self._graphs(action)
            for slot in graph.inputs
            if slot.role in (roles.ACTIVATION, roles.GRADIENT)
        ) and (action.op != "F" or not action.stage or action[1:] in self.generators)

    def _run_pass(self, graph: PassGraph, microbatch: int) -> None:
        inputs = [self._input(graph, slot, microbatch) for slot in graph.inputs]
        if graph.kind == "F" and graph.stage == 0:
            torch.manual_seed(self.seed + microbatch)
        elif graph.kind == "F":
            torch.set_rng_state(self.generators.pop((graph.stage, microbatch)))
        if graph.name not in self.modules:
            groups = self.compiled.step.process_groups
            self.modules[graph.name] = with_process_groups(graph.module, groups)
        with torch.no_grad():
            results = self.modules[graph.name](*inputs)
        if graph.kind == "F":
            self.generators[graph.stage + 1, microbatch] = torch.get_rng_state()
        for slot, node, value in zip(graph.outputs, graph.results, results, strict=True):
            expected = node.meta["val"]
            if (
                slot.role == roles.SAVED and value.shape != expected.shape
            ):  # an upper bound: CTC losses
                assert value.numel() < expected.numel(), slot
                expected = value
            assert (value.shape, value.dtype) == (expected.shape, expected.dtype), slot
            assert _strides(value) == _strides(expected), slot
            self._output(graph, slot, value, microbatch)

    def _input(self, graph: PassGraph, slot: roles.Slot, microbatch: int) -> Tensor:
        if slot.role in (roles.PARAMETER, roles.BUFFER, roles.CONSTANT):
            return self.resident[slot]
        if slot.role == roles.BATCH:
            return self.paths[microbatch][slot.name]
        if slot.role == roles.TANGENT:
            return torch.ones((), dtype=self.losses[microbatch].dtype) / len(self.batches)
        key = (microbatch, -1 if slot.role == roles.PART else graph.stage, slot)
        value = self.values[key]
        if slot.role != roles.SAVED or graph.kind in ("BW", self._last_reader(graph.stage, slot)):
            del self.values[key]
        return value

    def _last_reader(self, stage: int, slot: roles.Slot) -> str:
        passes = self.compiled.passes.items()
        return [p.kind for p, graph in passes if p.stage == stage and slot in graph.inputs][-1]

    def _output(self, graph: PassGraph, slot: roles.Slot, value: Tensor, microbatch: int) -> None:
        role, name = slot
        at = {
            roles.ACTIVATION: graph.stage + 1,
            roles.GRADIENT: graph.stage - 1,
            roles.SAVED: graph.stage,
            roles.PART: -1,
        }
        if role in at:
            self.values[microbatch, at[role], slot] = value
        elif role == roles.LOSS:
            self.losses[microbatch] = value
        elif role == roles.OUTPUT:
            self.outputs.setdefault(microbatch, {})[int(name)] = value
        elif role == roles.BUFFER_UPDATE:
            self.resident[roles.Slot(roles.BUFFER, name)].copy_(value)
        elif role == roles.WEIGHT_GRADIENT:
            key = (-graph.stage, name)
            self.sums[key] = self.sums[key] + value if key in self.sums else value.clone()


def _strides(tensor: Tensor) -> list[int]:
    """The strides of dimensions with more than one entry; the others are arbitrary."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def eager_step(
    model: nn.Module,
    batches: Sequence[Batch],
    loss_fn: Callable[..., Any] | None,
    seed: int = 0,
    in_place: bool = False,
) -> StepResult:
    """Runs the unsplit model: forward and backward of loss / m for each microbatch in turn."""
    model = model if in_place else copy.deepcopy(model)
    losses = []
    for index, (args, kwargs, target) in enumerate(batches):
        torch.manual_seed(seed + index)
        output = model(*args, **kwargs)
        loss = output if loss_fn is None else loss_fn(output, target)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss = loss if isinstance(loss, Tensor) else loss["loss"]
        losses.append(loss.detach())
        (loss / len(batches)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return StepResult(losses, gradients, dict(model.named_buffers()))


def differences(result: StepResult, expected: StepResult) -> list[str]:
    """Returns what is not equal under torch.equal."""
    names = result.gradients.keys() ^ expected.gradients.keys()
    found = [f"gradient of {name} on one side only" for name in names]
    pairs = [*zip(result.losses, expected.losses, ["loss"] * len(result.losses), strict=True)]
    for what in ("gradients", "buffers"):
        ours, theirs = getattr(result, what), getattr(expected, what)
        pairs += [(ours[n], theirs[n], f"{what}: {n}") for n in theirs if n not in names]
    return found + [name for one, two, name in pairs if not torch.equal(local(one), local(two))]


def run_uncut(step: StepGraph, model: nn.Module, batch: Batch, seed: int = 0) -> StepResult:
    """Runs the graph of one microbatch as it was exported."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    values = {step.tangent: torch.ones(())}
    for holders, tensors in (
        (step.parameters, dict(model.named_parameters(remove_duplicate=False))),
        (step.buffers, buffers),
        (step.constants, step.constant_values),
        (step.batch_inputs, dict(leaves_with_paths(batch))),
    ):
        values |= {node: tensors[name] for name, node in holders.items()}
    torch.manual_seed(seed)
    with torch.no_grad():
        for node in step.calls():
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            pairs = zip(tree_leaves(values[node]), tree_leaves(node.meta["val"]), strict=True)
            for value, expected in pairs:
                if isinstance(value, Tensor) and value.shape == expected.shape:
                    assert _strides(value) == _strides(expected), node.format_node()
    gradients = {name: values[node] for name, node in step.gradients.items() if node is not None}
    buffers |= {name: values[node] for name, node in step.buffer_updates.items()}
    return StepResult([values[step.loss]], gradients, buffers)


def uncut_as_eager(
    model: nn.Module, batch: Batch, loss: Any, in_place: bool = False, **options: Any
) -> StepGraph:
    """Returns the exported step of one microbatch, whose results have eager's bits."""
    step = export_training_step(model, *batch, loss, ExportOptions(**options))
    result = run_uncut(step, model, batch)
    assert not differences(result, eager_step(model, [batch], loss, in_place=in_place))
    return step


def split_as_eager(model: nn.Module, batches: Sequence[Batch], loss: Any, **options: Any) -> Runner:
    """Returns the runner of a step on two ranks, whose results have eager's bits."""
    step = export_training_step(model, *batches[0], loss, ExportOptions(**options))
    runner = Runner(compile_graph(step, ranks_of=(0, 1), exact=True), model, batches)
    orders = schedules.build("zb-h1", ranks=2, microbatches=len(batches)).orders
    assert not differences(runner.run(orders), eager_step(model, batches, loss))
    return runner


def compile_step(
    model: nn.Module,
    *batch: Any,
    ranks_of: Sequence[int],
    options: ExportOptions | None = None,
    **more: Any,
) -> CompiledStep:
    """Compiles the training step of one microbatch: args, kwargs, target and loss."""
    step = export_training_step(model, *batch, options=options)
    return compile_graph(step, ranks_of=ranks_of, **more)
