"""The split of a backward into B, which computes input gradients, and W, which computes weight
gradients.

W consists of the products whose results only reach gradients of parameters, of what follows them,
of views that only they read, and of bias sums of values that they read anyway. B is the rest. The
rule is the same on every stage. W then reads exactly the operands of its products. A custom
operator is a product if it has a FLOP formula (torch.utils.flop_counter.register_flop_formula).
"""

from collections import defaultdict
from typing import Any

import torch
from torch.fx import GraphModule, Node

from zbcompile.passes.capture.backward_marks import is_gradient_sum
from zbcompile.passes.capture.unsupported import DRAWS_IN_BACKWARD
from zbcompile.passes.cost.node_cost import is_custom, node_flops
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import is_random, is_view, operator_name
from zbcompile.passes.graph.source_location import line_of
from zbcompile.passes.graph.storage import storages_behind
from zbcompile.passes.partition.assign_stages import Stages
from zbcompile.passes.step_graph import BACKWARD, FORWARD, WEIGHT, Label, Labels, StepGraph

aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        *("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "_grouped_mm"),
        *("embedding_dense_backward", "convolution_backward"),
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
    for node in filter(is_random, backward):
        raise CaptureError(DRAWS_IN_BACKWARD.format(operator=node.target, line=line_of(node)))
    ends = _nodes_that_end_in_gradients(step, stages, backward)
    weight = {node for node in backward if _is_product(node) and ends[node]}
    _add_followers(weight, backward)
    for node in reversed(backward):
        readers = [user in weight and stages[user] == stages[node] for user in node.users]
        if is_view(node) and readers and all(readers):
            weight.add(node)
    read: dict[int, set[int]] = defaultdict(set)  # the storages that W reads, by stage
    for node in weight:
        read[stages[node]] |= storages_behind(node.all_input_nodes)
    for node in backward:
        shared = read[stages[node]] & storages_behind(node.all_input_nodes)
        weight_only = all(user in weight and stages[user] == stages[node] for user in node.users)
        if operator_name(node) == "sum" and (ends[node] or weight_only) and shared:
            weight.add(node)
    _add_followers(weight, backward)
    kinds = {**dict.fromkeys(backward, BACKWARD), **dict.fromkeys(weight, WEIGHT)}
    return {node: Label(stage, kinds.get(node, FORWARD)) for node, stage in stages.items()}


def _is_product(node: Node) -> bool:
    return operator_name(node) in PRODUCTS or (is_custom(node) and node_flops(node) > 0)


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
    of_batch = step.batch_values()
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


def _add_followers(weight: set[Node], backward: dict[Node, None]) -> None:
    for node in backward:
        if node not in weight and any(source in weight for source in node.all_input_nodes):
            weight.add(node)
