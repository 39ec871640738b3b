"""The split of a backward into B, which computes input gradients, and W, which computes weight
gradients.

W consists of the products whose results only reach gradients of parameters, of what follows them,
of views that only they read, and of bias sums of values that they read anyway. B is the rest. The
rule is the same on every stage. W then reads exactly the operands of its products.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from zbcompile.passes.capture.backward_marks import is_gradient_sum
from zbcompile.passes.capture.unsupported import DRAWS_IN_BACKWARD
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import is_random, is_view, operator_name, tensors_of
from zbcompile.passes.graph.source_location import line_of
from zbcompile.passes.partition.assign_stages import Stages
from zbcompile.passes.step_graph import BACKWARD, FORWARD, WEIGHT, Label, Labels, StepGraph
from zbcompile.passes.torch_private import GROUPED_MM, storage_key

aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default),
        *(aten.mv.default, aten.dot.default, GROUPED_MM.default),
        *(aten.embedding_dense_backward.default, aten.convolution_backward.default),
    }
)
# Operations through which the gradient of a product may pass on its way to a parameter.
LAYOUT = frozenset(
    {
        *("view", "t", "transpose", "permute", "reshape", "expand", "squeeze", "unsqueeze"),
        *("slice", "select", "clone", "detach", "alias", "_unsafe_view", "getitem"),
        *("add", "sum", "_to_copy", "cat", "constant_pad_nd"),
    }
)


def split_backward(step: StepGraph, stages: Stages) -> Labels:
    """Returns a label for every node that has a stage: F, B or W."""
    backward = step.backward_nodes()
    _refuse_random(backward)
    ends = _nodes_that_end_in_gradients(step, stages, backward)
    weight = {node for node in backward if node.target in PRODUCTS and ends[node]}
    _add_followers(weight, backward)
    for node in reversed(backward):
        readers = [user in weight and stages[user] == stages[node] for user in node.users]
        if is_view(node) and readers and all(readers):
            weight.add(node)
    read = _storages_read(weight, stages)
    for node in backward:
        shared = read.get(stages[node], set()) & set(map(storage_key, _operands(node)))
        weight_only = all(user in weight and stages[user] == stages[node] for user in node.users)
        if operator_name(node) == "sum" and (ends[node] or weight_only) and shared:
            weight.add(node)
    _add_followers(weight, backward)
    labels: Labels = {}
    for node, stage in stages.items():
        if node not in backward:
            labels[node] = Label(stage, FORWARD)
        else:
            labels[node] = Label(stage, WEIGHT if node in weight else BACKWARD)
    return labels


def split_convolutions(step: StepGraph) -> None:
    """Splits each backward of a convolution into one call for the input and one for the weights.

    Autograd computes all gradients in one call, which would be in B as a whole. The two calls
    compute the same bits.
    """
    for node in step.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        input_mask, *weight_mask = _mask_of(node)
        if not input_mask or not any(weight_mask):
            continue
        with step.graph.inserting_after(node):
            weight_call = step.graph.call_function(
                node.target, _with_mask(node, [False, *weight_mask])
            )
        input_value, *weight_values = node.meta["val"]
        weight_call.meta = {**node.meta, "val": (None, *weight_values)}
        node.meta = {**node.meta, "val": (input_value, None, None)}
        for user in list(node.users):
            if operator_name(user) == "getitem" and user.args[1] != 0:
                user.args = (weight_call, user.args[1])
        node.args = _with_mask(node, [True, False, False])


def merge_convolutions(module: GraphModule) -> None:
    """Undoes `split_convolutions` in a fused backward: one call reorders its operands once."""
    first_calls: dict[tuple[Any, ...], Node] = {}
    for node in list(module.graph.nodes):
        if node.target is not aten.convolution_backward.default:
            continue
        arguments = tuple(tuple(a) if isinstance(a, list) else a for a in node.args[:_MASK])
        first = first_calls.setdefault(arguments, node)
        masks = list(zip(_mask_of(first), _mask_of(node), strict=True))
        if first is node or any(one and second for one, second in masks):
            continue
        pairs = zip(first.meta["val"], node.meta["val"], strict=True)
        values = [one if second is None else second for one, second in pairs]
        first.args = _with_mask(first, [one or second for one, second in masks])
        first.meta = {**first.meta, "val": tuple(values)}
        node.replace_all_uses_with(first)
        module.graph.erase_node(node)
        module.recompile()


_MASK = 10  # position of output_mask in convolution_backward: input, weight, bias


def _mask_of(node: Node) -> list[bool]:
    return list(node.args[_MASK])  # type: ignore[arg-type]


def _with_mask(node: Node, mask: list[bool]) -> tuple[Any, ...]:
    return (*node.args[:_MASK], mask)


def _nodes_that_end_in_gradients(
    step: StepGraph, stages: Stages, backward: dict[Node, None]
) -> dict[Node, bool]:
    """Maps each backward node to True if its value only reaches gradients of parameters.

    On the way are layout operations and sums, also over stages, or on one stage operations with
    values of parameters, as of a weight norm.
    """
    ends: dict[Node, bool] = {}
    by_layout: set[Node] = set()
    of_batch = _of_batch(step)
    sent = set(step.vocabulary_values.results())
    for node in reversed(backward):
        readers = [user for user in node.users if user.op != "output"]
        ends[node] = node not in sent and all(user in backward and ends[user] for user in readers)
        layout = all(operator_name(user) in LAYOUT and user in by_layout for user in readers)
        if ends[node] and layout:
            by_layout.add(node)
        for user in readers:
            if stages.get(user) == stages[node]:
                operands = set(user.all_input_nodes) - {node}
                ends[node] &= operator_name(user) in LAYOUT or of_batch.isdisjoint(operands)
            else:
                ends[node] &= is_gradient_sum(user) and user in by_layout
    return ends


def _of_batch(step: StepGraph) -> set[Node]:
    """Returns all nodes that are computed from more than parameters, buffers and constants."""
    state = {*step.parameters.values(), *step.buffers.values(), *step.constants.values()}
    computed = set(step.graph.find_nodes(op="placeholder")) - state
    for node in step.calls():
        if not computed.isdisjoint(node.all_input_nodes):
            computed.add(node)
    return computed


def _add_followers(weight: set[Node], backward: dict[Node, None]) -> None:
    for node in backward:
        if node not in weight and any(source in weight for source in node.all_input_nodes):
            weight.add(node)


def _storages_read(weight: set[Node], stages: Stages) -> dict[int, set[int]]:
    """Returns the storages that the W of each stage reads."""
    read: dict[int, set[int]] = {}
    for node in weight:
        keys = read.setdefault(stages[node], set())
        keys.update(map(storage_key, _operands(node)))
    return read


def _operands(node: Node) -> Iterator[torch.Tensor]:
    for source in node.all_input_nodes:
        yield from tensors_of(source)


def _refuse_random(backward: dict[Node, None]) -> None:
    for node in backward:
        if is_random(node):
            line = line_of(node)
            raise CaptureError(DRAWS_IN_BACKWARD.format(operator=node.target, line=line))
