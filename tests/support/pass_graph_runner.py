"""Runs the pass graphs of a compiled training step in one process, in the order of a schedule, and
compares the results with eager mode bit for bit."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from zbcompile.passes.capture.batch_inputs import leaves_with_paths
from zbcompile.passes.capture.export import ExportOptions, export_training_step
from zbcompile.passes.capture.training_step import LossFunction
from zbcompile.passes.compile_options import Policy
from zbcompile.passes.compile_step import CompiledStep, compile_graph
from zbcompile.passes.graph.process_groups import with_process_groups
from zbcompile.passes.graph.roles import (
    ACTIVATION,
    BATCH,
    BUFFER,
    BUFFER_UPDATE,
    CONSTANT,
    GRADIENT,
    LOSS,
    OUTPUT,
    PARAMETER,
    PART,
    SAVED,
    TANGENT,
    WEIGHT_GRADIENT,
    Slot,
)
from zbcompile.passes.graph.storage import storage_bytes
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.step_graph import END, Label, StepGraph
from zbcompile.schedules.ir.actions import Action, flatten

Batch = tuple[tuple[Any, ...], dict[str, Any], Any]  # args, kwargs, target


def output_bytes(graph: PassGraph, role: str) -> int:
    """Returns the bytes of the outputs of one role, by storage."""
    pairs = zip(graph.outputs, graph.results, strict=True)
    return storage_bytes(node for slot, node in pairs if slot.role == role)


def owners_of(compiled: CompiledStep) -> dict[str, list[int]]:
    """Returns the stages that read each parameter, lowest first."""
    readers = {
        (slot.name, label.stage)
        for label, graph in compiled.passes.items()
        for slot in graph.inputs
        if slot.role == PARAMETER
    }
    return {n: sorted(s for name, s in readers if name == n) for n in compiled.step.parameters}


@dataclass
class StepResult:
    """Losses, gradients, buffers and outputs of a step over several microbatches."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class Runner:
    """Executes the actions of all ranks, each as soon as its inputs are there."""

    def __init__(
        self, compiled: CompiledStep, model: nn.Module, batches: Sequence[Batch], seed: int
    ) -> None:
        self.compiled, self.batches, self.seed = compiled, batches, seed
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = {
            name: buffer.detach().clone()
            for name, buffer in model.named_buffers(remove_duplicate=False)
        }
        self.paths = [dict(leaves_with_paths(batch)) for batch in batches]
        self.values: dict[tuple[int, int, Slot], Tensor] = {}  # microbatch, stage, slot
        self.generators: dict[tuple[int, int], Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        self.stage_sums: dict[tuple[str, int], Tensor] = {}
        self.outputs: dict[int, dict[int, Tensor]] = {}
        self.modules: dict[str, Any] = {}

    def run(self, orders: Sequence[Sequence[Any]]) -> StepResult:
        pending = [list(flatten(order)) for order in orders]
        while any(pending):
            progress = False
            for order in pending:
                while order and self._is_ready(order[0]):
                    self._run_action(order.pop(0))
                    progress = True
            assert progress, f"deadlock before {[order[0] for order in pending if order]}"
        for microbatch in range(len(self.batches)):
            for label, graph in self.compiled.passes.items():
                if label.kind == END:
                    self._run_pass(graph, microbatch)
        left = list(self.values)
        assert not left, f"values that no pass has read: {left[:5]}"
        return StepResult(
            [self.losses[i] for i in range(len(self.batches))], self._gradients(), self.buffers
        )

    def _gradients(self) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for (name, _), value in sorted(self.stage_sums.items(), key=lambda item: -item[0][1]):
            gradients[name] = gradients[name] + value if name in gradients else value
        return gradients

    def _graphs(self, action: Any) -> list[PassGraph]:
        if action.op == "BW":
            return [self.compiled.fused[action.stage]]
        labels = [Label(action.stage, kind) for kind in action.op]
        return [self.compiled.passes[label] for label in labels if label in self.compiled.passes]

    def _is_ready(self, action: Any) -> bool:
        for graph in self._graphs(action)[:1]:
            for slot in graph.inputs:
                key = (action.microbatch, action.stage, slot)
                if slot.role in (ACTIVATION, GRADIENT) and key not in self.values:
                    return False
        if action.op == "F" and action.stage:
            return (action.stage, action.microbatch) in self.generators
        return True

    def _run_action(self, action: Any) -> None:
        for graph in self._graphs(action):
            self._run_pass(graph, action.microbatch)

    def _run_pass(self, graph: PassGraph, microbatch: int) -> None:
        inputs = [self._input(graph, slot, microbatch) for slot in graph.inputs]
        if graph.kind == "F":
            if graph.stage == 0:
                torch.manual_seed(self.seed + microbatch)
            else:
                torch.set_rng_state(self.generators.pop((graph.stage, microbatch)))
        with torch.no_grad():
            results = self._module(graph)(*inputs)
        if graph.kind == "F":
            self.generators[graph.stage + 1, microbatch] = torch.get_rng_state()
        for slot, node, value in zip(graph.outputs, graph.results, results, strict=True):
            expected = node.meta["val"]
            if slot.role == SAVED and value.shape != expected.shape:  # an upper bound: CTC losses
                assert value.numel() < expected.numel(), slot
                expected = value
            assert value.shape == expected.shape, slot
            assert value.dtype == expected.dtype, slot
            assert _strides(value) == _strides(expected), slot
            self._output(graph, slot, value, microbatch)

    def _module(self, graph: PassGraph) -> Any:
        if graph.name not in self.modules:
            self.modules[graph.name] = with_process_groups(
                graph.module, self.compiled.step.process_groups
            )
        return self.modules[graph.name]

    def _input(self, graph: PassGraph, slot: Slot, microbatch: int) -> Tensor:
        role, name = slot
        if role == PARAMETER:
            return local(self.parameters[name].detach())
        if role == BUFFER:
            return local(self.buffers[name])
        if role == CONSTANT:
            return self.compiled.step.constant_values[name]
        if role == BATCH:
            return self.paths[microbatch][name]
        if role == TANGENT:
            loss = self.compiled.step.loss
            assert loss is not None
            return torch.ones((), dtype=loss.meta["val"].dtype) / len(self.batches)
        if role == PART:
            return self.values.pop((microbatch, -1, slot))
        key = (microbatch, graph.stage, slot)
        value = self.values[key]
        if role != SAVED or graph.kind in ("BW", self.last_reader(graph.stage, slot)):
            del self.values[key]
        return value

    def last_reader(self, stage: int, slot: Slot) -> str:
        kinds = [
            label.kind
            for label, graph in self.compiled.passes.items()
            if label.stage == stage and slot in graph.inputs
        ]
        return kinds[-1]

    def _output(self, graph: PassGraph, slot: Slot, value: Tensor, microbatch: int) -> None:
        role, name = slot
        stage = {ACTIVATION: graph.stage + 1, GRADIENT: graph.stage - 1, SAVED: graph.stage}
        if role in stage:
            self.values[microbatch, stage[role], slot] = value
        elif role == PART:
            self.values[microbatch, -1, slot] = value
        elif role == LOSS:
            self.losses[microbatch] = value
        elif role == OUTPUT:
            self.outputs.setdefault(microbatch, {})[int(name)] = value
        elif role == BUFFER_UPDATE:
            self.buffers[name].copy_(value)
        elif role == WEIGHT_GRADIENT:
            key = (name, graph.stage)
            previous = self.stage_sums.get(key)
            self.stage_sums[key] = value.clone() if previous is None else previous + value


def _strides(tensor: Tensor) -> list[int]:
    """The strides of dimensions with more than one entry; the others are arbitrary."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def eager_step(
    model: nn.Module,
    batches: Sequence[Batch],
    loss_fn: Callable[..., Any] | None,
    seed: int,
    in_place: bool = False,
) -> StepResult:
    """Runs the unsplit model: forward and backward of loss / m for each microbatch in turn."""
    model = model if in_place else copy.deepcopy(model)
    losses = []
    for index, (args, kwargs, target) in enumerate(batches):
        torch.manual_seed(seed + index)
        output = model(*args, **kwargs)
        if loss_fn is not None:
            loss = loss_fn(output, target)
            loss = loss[0] if isinstance(loss, tuple) else loss
        else:
            loss = output if isinstance(output, Tensor) else output["loss"]
        losses.append(loss.detach())
        (loss / len(batches)).backward()
    gradients = {
        name: param.grad for name, param in model.named_parameters() if param.grad is not None
    }
    return StepResult(losses, gradients, dict(model.named_buffers()))


def differences(result: StepResult, expected: StepResult) -> list[str]:
    """Returns what is not equal under torch.equal."""
    matches = []
    for index, (one, second) in enumerate(zip(result.losses, expected.losses, strict=True)):
        if not torch.equal(local(one), local(second)):
            matches.append(f"loss {index}")
    if result.gradients.keys() != expected.gradients.keys():
        matches.append(f"parameters {result.gradients.keys() ^ expected.gradients.keys()}")
    for name in result.gradients.keys() & expected.gradients.keys():
        if not torch.equal(local(result.gradients[name]), local(expected.gradients[name])):
            matches.append(f"gradient of {name}")
    for name, buffer in expected.buffers.items():
        if not torch.equal(local(result.buffers[name]), local(buffer)):
            matches.append(f"buffer {name}")
    return matches


def run_uncut(step: StepGraph, model: nn.Module, batch: Batch, seed: int = 0) -> StepResult:
    """Runs the graph of one microbatch as it was exported."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    values = {step.tangent: torch.ones(())}
    for holders, tensors in (
        (step.parameters, parameters),
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


def compile_step(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    target: Any = None,
    loss_fn: LossFunction | None = None,
    *,
    ranks_of: Sequence[int],
    exact: bool = False,
    options: ExportOptions | None = None,
    recompute: Policy | Sequence[Policy] = "hints",
) -> CompiledStep:
    """Compiles the training step of one microbatch.

    Args:
        ranks_of: The rank of each stage, such as `(0, 1, 1, 0)` for a V on two ranks.
        exact: Whether gradients of parameters that several stages read are added in autograd's
            order.
        recompute: What the backward recomputes, for all stages or for each.
    """
    step = export_training_step(model, args, kwargs, target, loss_fn, options)
    return compile_graph(step, ranks_of=ranks_of, exact=exact, recompute=recompute)


def run_forward(compiled: CompiledStep, model: nn.Module, batch: Batch) -> Any:
    """Runs the forward of one microbatch through all stages and returns the rebuilt output."""
    runner = Runner(compiled, model, [batch], seed=0)
    for label in compiled.passes:
        runner._run_action(Action(label.kind, label.stage, 0))
    assert not runner.values
    assert compiled.step.output_structure is not None
    return compiled.step.output_structure.rebuild(
        [value for _, value in sorted(runner.outputs[0].items())]
    )
