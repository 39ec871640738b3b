"""Operators that stand for calls, of autograd.Functions and of modules with DTensors: what they compute, forward and
backward, as plain operations that can be priced."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.capture.opaque_calls import form_of, is_call
from zbcompile.passes.graph.fx import like, operations_behind, output_values
from zbcompile.passes.graph.kernel_layouts import kernels_layouts
from zbcompile.passes.machine.flops import count_flops
from zbcompile.passes.torch_private import FakeTensorMode, make_fx, single_threaded_backward


@dataclass(frozen=True)
class CallPasses:
    """The operations of a call that belong to F, B and W, and the FLOPs of each operation."""

    passes: tuple[frozenset[Node], ...]
    flops: Mapping[Node, int]

    @property
    def forward_flops(self) -> int:
        return sum(self.flops[node] for node in self.passes[0])


def inside_calls(graph: Graph) -> dict[Node, CallPasses]:
    """The passes of every call in the graph, by its node. Calls that compute the same are traced once."""
    calls = list(filter(is_call, graph.nodes))
    first = {form_of(node): node for node in reversed(calls)}
    found = {form: _inside(node) for form, node in first.items()}
    return {node: found[form_of(node)] for node in calls}


def _inside(call: Node) -> CallPasses:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module, arguments = _traced(call, mode), call.all_input_nodes
    values, count = output_values(module.graph), len(call.meta["val"])
    gradients = list(zip(arguments, values[count:], strict=True))
    forward = _behind(values[:count])
    flops = count_flops(module, mode)
    backward = _behind(value for argument, value in gradients if not _is_weight(argument)) - forward
    own = [_behind([value]) - forward - backward for argument, value in gradients if _is_weight(argument)]
    backward = backward.union(*(nodes for nodes in own if backward and not any(flops[node] for node in nodes)))
    weight = frozenset().union(*own) - backward
    return CallPasses((forward, backward, weight), flops)


def _traced(call: Node, mode: FakeTensorMode) -> GraphModule:
    """The call on fake tensors, and the gradients of its inputs."""
    positions = [call.all_input_nodes.index(node) for node in call.args[0]]  # type: ignore[union-attr, arg-type]

    def run(given: list[torch.Tensor], arriving: list[torch.Tensor]) -> list[Any]:
        with torch.enable_grad():
            results = call.target([given[at] for at in positions], call.args[1])  # type: ignore[operator]
        pairs = [pair for pair in zip(results, arriving, strict=True) if pair[0].requires_grad]
        trained = [tensor for tensor in given if tensor.requires_grad] if pairs else []
        roots, tangents = zip(*pairs, strict=True) if trained else ((), ())
        found = iter(torch.autograd.grad(roots, trained, tangents, allow_unused=True) if trained else ())
        return [*results, *(next(found) if trained and tensor.requires_grad else None for tensor in given)]

    with mode, kernels_layouts(), single_threaded_backward():
        given = [like(n.meta["val"]).requires_grad_(n.meta["differentiable"]) for n in call.all_input_nodes]
        return make_fx(run)(given, [like(value) for value in call.meta["val"]])


def _behind(values: Iterable[Any]) -> frozenset[Node]:
    return frozenset(operations_behind(value for value in values if isinstance(value, Node)))


def _is_weight(node: Node) -> bool:
    return node.op == "placeholder" and node.meta["slot"].kind == "parameter"
