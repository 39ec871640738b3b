"""Gradients of parameters that several stages read, tied or used twice.

With `exact=True` the sum of a microbatch's parts runs at the end of the step, in autograd's order
(label E). By default the sum is regrouped: every stage adds its own uses over all microbatches,
and the engine adds the stages' sums once after the step.
"""

from collections.abc import Mapping

from torch.fx import Node

from zbcompile.passes.capture.backward_marks import is_gradient_sum
from zbcompile.passes.graph.fx import operator_name, reached
from zbcompile.passes.step_graph import BACKWARD, END, WEIGHT, Label, Labels, StepGraph


def label_tied_gradients(step: StepGraph, labels: Labels, exact: bool) -> dict[str, frozenset[int]]:
    """Labels the sums of gradients over stages E, or replaces them by one sum per stage.

    Returns the stages of the parts of every sum that is labeled E, by parameter.
    """
    end = _sums_over_stages(step, labels)

    def inside(node: Node) -> list[Node]:
        return node.all_input_nodes if node in end else []

    if exact:
        for node in reversed(end):  # all sums of one gradient run on one stage
            stages = [labels[user].stage for user in node.users if user in end]
            labels[node] = Label(min(stages, default=labels[node].stage), END)
        return {
            name: frozenset(
                labels[part].stage for part in reached([gradient], inside).keys() - end.keys()
            )
            for name, gradient in step.gradients.items()
            if gradient is not None and gradient in end
        }
    for name, gradient in list(step.gradients.items()):
        if gradient is not None and gradient in end:
            step.stage_gradients[name] = _sum_per_stage(step, labels, gradient, end)
            del step.gradients[name]
    step.refresh_output()
    for node in reversed(end):
        if not node.users:
            step.graph.erase_node(node)
            del labels[node]
    return {}


def _sums_over_stages(step: StepGraph, labels: Labels) -> dict[Node, None]:
    """Returns the sums of gradients of several stages and what follows them, in order."""
    end: dict[Node, None] = {}
    for node in step.backward_nodes():
        if any(source in end for source in node.all_input_nodes):
            end[node] = None
        elif is_gradient_sum(node) and _reaches_gradients_only(node):
            sources = [labels[source] for source in node.all_input_nodes if source in labels]
            if any(source.stage != labels[node].stage for source in sources):
                end[node] = None
    return end


def _reaches_gradients_only(node: Node) -> bool:
    """Returns True if gradients of parameters are all that is computed from a sum."""

    def is_simple(value: Node) -> bool:
        return is_gradient_sum(value) or operator_name(value) in _TAIL

    values = reached([node], lambda value: [*value.users] if is_simple(value) else ())
    return all(value.op == "output" or (value.users and is_simple(value)) for value in values)


_TAIL = frozenset({"_to_copy", "t", "view", "permute", "transpose", "detach"})


def _sum_per_stage(
    step: StepGraph, labels: Labels, gradient: Node, end: Mapping[Node, None]
) -> dict[int, Node]:
    """Returns one sum per stage of the parts of a gradient, added in autograd's order."""
    parts: dict[int, list[Node]] = {}
    for part in _parts(gradient, end, labels):
        parts.setdefault(labels[part].stage, []).append(part)
    return {stage: _add_parts(step, labels, nodes) for stage, nodes in parts.items()}


def _parts(node: Node, end: Mapping[Node, None], labels: Labels) -> list[Node]:
    """Returns the nodes that a sum adds; casts and views of a sum are applied to its parts."""
    if node not in end:
        return [node]
    if is_gradient_sum(node):
        return [part for source in node.all_input_nodes for part in _parts(source, end, labels)]
    copies = []
    (source,) = node.all_input_nodes
    for part in _parts(source, end, labels):
        graph = node.graph
        with graph.inserting_before(node):
            copy = graph.node_copy(node, lambda _, part=part: part)  # type: ignore[misc]
        copy.meta = dict(node.meta)
        labels[copy] = labels[part]
        copies.append(copy)
    return copies


def _add_parts(step: StepGraph, labels: Labels, parts: list[Node]) -> Node:
    total = parts[0]
    kind = WEIGHT if any(labels[part].kind == WEIGHT for part in parts) else BACKWARD
    for part in parts[1:]:
        total = step.insert_sum(total, part, before=step.graph.output_node())
        labels[total] = Label(labels[part].stage, kind)
    return total
