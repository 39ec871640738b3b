"""Operators that stand for calls, of autograd.Functions and of modules with DTensors: what they compute, forward and
backward, as plain operations that can be priced."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.capture.custom_functions import form_of, is_call
from zbcompile.passes.graph.flops import count_flops
from zbcompile.passes.graph.fx import like, operations_behind, output_values
from zbcompile.passes.graph.kernel_layouts import kernels_layouts
from zbcompile.passes.graph.process_groups import is_under_way
from zbcompile.passes.graph.rematerialize import can_remake
from zbcompile.passes.graph.storage import most_alive, storage_bytes, storages_behind, tensors_of
from zbcompile.passes.torch_private import FakeTensorMode, make_fx, single_threaded_backward, storage_key


@dataclass(frozen=True)
class Inside:
    """The operations of a call that belong to F, B and W, and the FLOPs of each operation. `left` is what W reads of
    the others: which input of the call (None: none of them), and the bytes. `running` are the bytes that F and B need
    beside inputs, results, their gradients and what is saved. Full recomputation runs `repeated` again and keeps so
    many bytes (`fixed`)."""

    passes: tuple[frozenset[Node], ...]
    flops: Mapping[Node, int]
    left: tuple[tuple[int | None, int], ...]
    running: tuple[int, int]
    repeated: frozenset[Node]
    fixed: int

    @property
    def forward_flops(self) -> int:
        return sum(self.flops[node] for node in self.passes[0])


def inside_calls(graph: Graph) -> dict[Node, Inside]:
    """By the nodes that are such operators; calls that compute alike are traced once."""
    calls = list(filter(is_call, graph.nodes))
    first = {form_of(node): node for node in reversed(calls)}
    found = {form: _inside(node) for form, node in first.items()}
    return {node: found[form_of(node)] for node in calls}


def _inside(call: Node) -> Inside:
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
    holders = module.graph.find_nodes(op="placeholder")
    passes, inputs = (forward, backward, weight), holders[: len(arguments)]
    weights = storages_behind(holder for holder, each in zip(inputs, arguments, strict=True) if _is_weight(each))
    left = tuple(_left(weight, inputs))
    running, recomputed = _running(module.graph, passes, weights), _recomputed(module.graph, forward)
    return Inside(passes, flops, left, running, *recomputed)


def _running(graph: Graph, passes: Sequence[frozenset[Node]], weights: set[int]) -> tuple[int, int]:
    """What waits before or behind a pass, and values and gradients that reach the call or leave it, count outside."""
    forward, backward, weight = ([node for node in graph.nodes if node in each] for each in passes)
    given = storages_behind(graph.find_nodes(op="placeholder"))
    ends = storages_behind(value for value in output_values(graph) if isinstance(value, Node))
    staying = ends | _read(backward) | _read(weight)
    made = {t for node in forward for t in tensors_of(node.meta["val"]) if storage_key(t) in staying}
    saved = {t for node in backward for each in node.all_input_nodes for t in tensors_of(each.meta["val"])}
    arriving = _read(backward) - storages_behind(backward)
    counted = [t for t in saved if storage_key(t) in arriving]
    counted += [t for node in backward for t in tensors_of(node.meta["val"]) if storage_key(t) in ends - arriving]
    return (
        most_alive(forward, set(), staying, given) - storage_bytes(made, given),
        max(0, most_alive(backward, arriving, ends | _read(weight), weights) - storage_bytes(counted, weights)),
    )


def _read(nodes: Iterable[Node]) -> set[int]:
    return storages_behind(each for node in nodes for each in node.all_input_nodes)


def _recomputed(graph: Graph, forward: frozenset[Node]) -> tuple[frozenset[Node], int]:
    """What is recomputed because something behind the forward reads it, and the bytes of what is read there, or on the
    way to it, and cannot be recomputed."""
    queue = list({each for node in graph.nodes if node not in forward for each in node.all_input_nodes} & forward)
    seen, again, once = set(queue), set[Node](), list[torch.Tensor]()
    while queue:
        node = queue.pop()
        if can_remake(node) or is_under_way(node):
            again.add(node)
            queue += forward.intersection(node.all_input_nodes) - seen
            seen.update(node.all_input_nodes)
        else:
            once += tensors_of(node.meta["val"])
    return frozenset(again), storage_bytes(once)


def _left(weight: frozenset[Node], inputs: Sequence[Node]) -> Iterator[tuple[int | None, int]]:
    positions = {storage_key(node.meta["val"]): at for at, node in enumerate(inputs)}
    read = {node for each in weight for node in each.all_input_nodes} - weight
    tensors = {storage_key(t): t for node in read for t in tensors_of(node.meta["val"])}
    return ((positions.get(key), tensor.untyped_storage().nbytes()) for key, tensor in tensors.items())


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
