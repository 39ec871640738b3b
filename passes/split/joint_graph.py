"""The joint graph of a stage: its forward and the whole backward in one graph, made by tracing autograd itself.

Tracing runs from the last stage to the first, because a tangent must have the strides with which the next stage's
gradient really arrives: other strides, other kernels, other bits.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta

from zbcompile.passes.capture.functional_writes import GRADIENT_LAYOUT
from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.graph.fx import any_gradient, is_use, leaf_like, like, output_values
from zbcompile.passes.graph.gpu_kernels import kernel_of
from zbcompile.passes.graph.kernel_layouts import kernels_layouts
from zbcompile.passes.graph.process_groups import rename_groups
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.strides import boundary_like, laid_out_like
from zbcompile.passes.partition.shared_parameters import SEPARATE_USES
from zbcompile.passes.partition.stage_graphs import Stage
from zbcompile.passes.split.backward_locations import MarkingInterpreter, described_backward
from zbcompile.passes.split.in_place import calculate_alike, in_place_operation, replace_writes_into_fresh
from zbcompile.passes.torch_private import (
    FakeTensorMode,
    functional,
    local_part,
    make_fx,
    single_threaded_backward,
    traced_node,
)

_Named = tuple[tuple[Slot, Node], ...]


@dataclass(frozen=True)
class Recomputation:
    """What the backward of a stage recomputes, per microbatch: the number of operations of the forward, their FLOPs,
    and the bytes that wait between F and B without and with it."""

    operations: int
    flops: int
    kept_before: int
    kept_after: int


@dataclass(frozen=True)
class Joint:
    """Forward and backward of a stage. Inputs are the stage's and its tangents; outputs the stage's and gradients.

    Outputs of kind `virtual_gradient` are for the split alone. `gradient_of_input` maps each activation that gets a
    gradient to the fake tensor of that gradient. `recomputed` is set by the pass of that name,
    `deferred` by `zbcompile.passes.split.defer_sums`. A trace says which nodes were there before the `forward` ended.
    """

    stage: Stage
    module: GraphModule
    inputs: tuple[tuple[Slot, Node], ...]
    outputs: tuple[tuple[Slot, Node], ...]
    gradient_of_input: Mapping[str, torch.Tensor]
    recomputed: Recomputation | None = None
    deferred: Mapping[str, str] = field(default_factory=dict)
    forward: frozenset[Node] = frozenset()


def trace_joint(
    stage: Stage,
    trainable: frozenset[str],
    tangents: Mapping[str, torch.Tensor],
    exact: bool = False,
    dimensions: Mapping[str, str] = MappingProxyType({}),
) -> Joint:
    """Trace forward and backward of `stage`.

    `tangents` maps each activation the stage sends, to the fake gradient that comes back for it ("loss": the factor of
    this microbatch's loss). An activation without an entry gets no gradient.

    Some composite operations work in place below autograd (see `zbcompile.passes.split.in_place`). If that cannot be
    undone, the stage is traced again with copies. If these change how anything is calculated, `exact` forbids it:
    CaptureError.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    holders = stage.module.graph.find_nodes(op="placeholder")
    slots = [*stage.inputs, *(Slot("tangent", name) for name in tangents)]
    with mode:
        primals = [leaf_like(node, trainable) for node in holders]
        arriving = [like(value) for value in tangents.values()]
    run = _JointFunction(stage, len(primals), tuple(tangents))
    with mode, kernels_layouts(), single_threaded_backward(), preserve_node_meta():
        module = make_fx(run)(*primals, *arriving)
        replace_writes_into_fresh(module)
        if in_place_operation(module):
            module = _trace_functional(run, [*primals, *arriving], module, exact)
    _refuse_mode_dependent(module)
    _drop_results_without_value(module)
    rename_groups(module, dimensions)
    nodes = module.graph.find_nodes(op="placeholder")
    returned = zip([*stage.outputs, *run.gradients], output_values(module.graph), strict=True)
    outputs = [(slot, node) for slot, node in returned if isinstance(node, Node)]
    for node, slot in zip(nodes, slots, strict=True):
        node.meta["slot"] = slot
    inputs = tuple(zip(slots, nodes, strict=True))
    return joint_of(stage, module, inputs, tuple(outputs), exact, forward=run.forward)


def joint_of(stage: Stage, module: GraphModule, inputs: _Named, outputs: _Named, exact: bool, **more: Any) -> Joint:
    """The joint graph in `module`, and the gradients that leave it."""
    leaving = {s.name: boundary_like(n.meta["val"], exact) for s, n in outputs if s.kind == "input_gradient"}
    return Joint(stage, module, inputs, outputs, leaving, **more)


def _trace_functional(run: "_JointFunction", values: list[Any], written: GraphModule, exact: bool) -> GraphModule:
    found = in_place_operation(written)
    names = {"stage": run.stage.index, "operation": found}
    try:
        module = make_fx(functional(run))(*values)
    except Exception as error:
        raise Refusal.NO_FUNCTIONAL_FORM.error(**names, error=f" ({error})") from error
    if in_place_operation(module):
        raise Refusal.NO_FUNCTIONAL_FORM.error(**names, error="")
    if exact and not calculate_alike(written, module):
        raise Refusal.IN_PLACE_INEXACT.error(**names)
    return module


def _refuse_mode_dependent(module: GraphModule) -> None:
    """Refuse oneDNN's LSTM: without grad mode, as compiled graphs run, it does not keep what its backward needs."""
    if any(str(node.target).startswith("aten.mkldnn_rnn_layer") for node in module.graph.nodes):
        raise Refusal.ONEDNN_LSTM.error()


def _drop_results_without_value(module: GraphModule) -> None:
    """Drop results of CUDA's attention that are None or numbers: the trace has written these where they are used."""
    for node in module.graph.find_nodes(op="call_function", target=operator.getitem):
        if node.meta.get("val") is None and not node.users:
            module.graph.erase_node(node)


class _JointFunction:
    """The function that is traced: the stage's forward, then `torch.autograd.grad` for whatever wants a gradient."""

    def __init__(self, stage: Stage, primals: int, tangents: tuple[str, ...]) -> None:
        self.stage, self.primals, self.tangents = stage, primals, tangents
        self.gradients: list[Slot] = []
        self.forward: frozenset[Node] = frozenset()

    def __call__(self, *flat: Any) -> list[Any]:
        primals, tangents = flat[: self.primals], flat[self.primals :]
        interpreter = _UseInterpreter(self.stage.module, garbage_collect_values=False)
        with torch.enable_grad():
            outputs = interpreter.run(*primals)
        found = next(filter(None, map(traced_node, map(local_part, flat))), None)
        self.forward = frozenset(() if found is None else found[0].graph.nodes)
        pairs = []
        for slot, primal in zip(self.stage.inputs, primals, strict=True):
            gradient = gradient_slot(slot)
            pairs += [(gradient, value) for value in interpreter.last_use_first(slot) or [primal]]
        first = first_activations(self.stage)
        pairs += [(Slot("virtual_gradient", node.name), interpreter.env[node]) for node in first]
        pairs = [(slot, value) for slot, value in pairs if isinstance(value, torch.Tensor) and value.requires_grad]
        self.gradients = [slot for slot, _ in pairs]
        return [*outputs, *self._backward(outputs, [value for _, value in pairs], tangents)]

    def _backward(self, outputs: Any, wanted: list[torch.Tensor], tangents: tuple[Any, ...]) -> list[Any]:
        by_name = {(slot.name or "loss"): value for slot, value in zip(self.stage.outputs, outputs, strict=True)}
        roots = [by_name[name] for name in self.tangents]
        for name, root in zip(self.tangents, roots, strict=True):
            if not root.requires_grad:
                raise Refusal.OUTPUT_WITHOUT_GRADIENT.error(name=name)
        if not wanted or not roots:
            return [None] * len(wanted)
        with described_backward():
            return list(torch.autograd.grad(roots, wanted, grad_outputs=tangents, allow_unused=True))


class _UseInterpreter(MarkingInterpreter):
    """Makes every marked use of a parameter a separate tensor, so that each use has its own gradient."""

    def __init__(self, module: GraphModule, garbage_collect_values: bool) -> None:
        super().__init__(module, garbage_collect_values)
        self.uses: dict[Slot, list[list[torch.Tensor]]] = {}  # by parameter: of each operation, in order

    def map_nodes_to_values(self, args: Any, n: Node) -> Any:
        if not is_use(n) or not any(SEPARATE_USES in node.meta for node in n.all_input_nodes):
            return super().map_nodes_to_values(args, n)
        found: dict[Slot, list[torch.Tensor]] = {}

        def load(node: Node) -> Any:
            value = self.env[node]
            if SEPARATE_USES in node.meta:
                value = any_gradient(value.detach())
                found.setdefault(node.meta["slot"], []).append(value)
            return value

        loaded = map_arg(args, load)
        for slot, values in found.items():
            self.uses.setdefault(slot, []).append(values)
        return loaded

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(kernel_of(target, args), args, kwargs)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        # Eager copies the gradient of what is written through a view into a tensor with the strides of the base.
        if GRADIENT_LAYOUT in n.meta and isinstance(value, torch.Tensor) and value.requires_grad:
            dense = n.meta[GRADIENT_LAYOUT] == "contiguous"
            value.register_hook(lambda g: g.contiguous() if dense else laid_out_like(g, value.stride()))
        return value

    def last_use_first(self, slot: Slot) -> list[torch.Tensor]:
        """The uses of a parameter in eager's order: the last operation first, what one operation reads as it reads."""
        return [value for values in reversed(self.uses.get(slot, [])) for value in values]


def gradient_slot(slot: Slot) -> Slot:
    """The slot of the gradient of a parameter or an activation."""
    return Slot("gradient" if slot.kind == "parameter" else "input_gradient", slot.name)


def first_activations(stage: Stage) -> list[Node]:
    """The values in which a stage's parameters first meet its data: an embedding's output, that of a first layer.

    Their gradients are proxies for input gradients, see `zbcompile.passes.split.split`. A value is not one of them if
    it depends on differentiable data, or only on parameters and constants (a normalised weight).
    """
    data = data_of(stage)
    carrying: set[Node] = set()  # depends on data through which a gradient flows
    first: list[Node] = []
    for node in data:
        carried = node.op == "placeholder" or bool(carrying.intersection(node.all_input_nodes))
        if node.meta["differentiable"] and (carried or isinstance(node.meta["val"], torch.Tensor)):
            carrying.add(node)
            first += [] if carried else [node]
    return first


def data_of(stage: Stage) -> dict[Node, None]:
    """What a stage is given to compute on, and what depends on it, in order."""
    data: dict[Node, None] = {}
    for node in stage.module.graph.nodes:
        given = node.op == "placeholder" and node.meta["slot"].kind in ("input", "activation")
        if given or (node.op != "output" and any(each in data for each in node.all_input_nodes)):
            data[node] = None
    return data


def tangents_of(stage: Stage, gradients: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """The fake gradients that arrive for what `stage` sends, of one value from the last stage first, as eager adds
    them; `gradients` are those that leave later stages (`gradients_before`).

    The last stage has none behind it (None): there the tangent is that of the loss.
    """
    if gradients is not None:
        return {s.name: gradients[s.name] for s in stage.outputs if s.kind == "activation" and s.name in gradients}
    results = zip(stage.outputs, output_values(stage.module.graph), strict=True)
    (loss,) = (node for slot, node in results if slot.kind == "loss")
    return {"loss": loss.meta["val"]}


def gradients_before(
    stage: Stage, arriving: Mapping[str, torch.Tensor] | None, leaving: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The fake gradients that arrive at the stages before `stage`: those that leave it, and of those that arrive at it
    or before it what goes straight past it."""
    own = {slot.name for slot in stage.outputs if slot.kind == "activation"}
    return {name: value for name, value in (arriving or {}).items() if name not in own} | dict(leaving)


def reached_by_gradients(joint: Joint) -> set[Node]:
    """The tangents, and every operation that depends on one."""
    reached = {node for slot, node in joint.inputs if slot.kind == "tangent"}
    for node in joint.module.graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return reached
