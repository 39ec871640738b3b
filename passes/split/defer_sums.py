"""Deferred sums: an all-reduce that only concerns the gradient of a weight runs once per step.

Under sequence parallelism every rank computes a part of the gradient of a norm's weight, and some
models sum the parts in every microbatch. The sum over ranks of what each has accumulated is the
same, up to rounding, so the engine reduces `.grad` at the end of the step instead.
"""

from torch.fx import Node

from zbcompile.passes.graph.fx import is_view, operator_name
from zbcompile.passes.graph.process_groups import collective_name, group_of, is_wait
from zbcompile.passes.step_graph import StepGraph


def defer_sums(step: StepGraph) -> None:
    """Removes the sums over ranks at the ends of weight gradients from a step graph, in place.

    `step.deferred_sums` then has the mesh dimension over which the engine sums each of these
    gradients. A sum that several values read stays, and so does one over a group that is no mesh
    dimension. Not used with `exact=True`: the sum of sums rounds in another order.
    """
    for name, gradient in step.gradients.items():
        wait = _sum_behind(gradient)
        if wait is None:
            continue
        collective = wait.args[0]
        assert isinstance(collective, Node)
        step.deferred_sums[name] = str(group_of(collective))
        part = collective.all_input_nodes[0]
        if gradient is wait:
            step.gradients[name] = part
        wait.replace_all_uses_with(part)
        step.graph.erase_node(wait)
        step.graph.erase_node(collective)
    step.refresh_output()


def _sum_behind(node: Node | None) -> Node | None:
    """Returns the wait for a sum over ranks if a gradient is a view of it and its only reader."""
    while node is not None and len(node.users) == 1:
        if not is_view(node) and operator_name(node) != "copy":
            break  # an in-place collective ends in copy(summand, sum)
        node = node.all_input_nodes[-1]
    if node is None or not is_wait(node) or len(node.users) != 1:
        return None
    collective = node.args[0]
    if not isinstance(collective, Node) or collective_name(collective) != "all_reduce":
        return None
    named = not str(group_of(collective)).startswith("group")
    return node if collective.args[1] == "sum" and len(collective.users) == 1 and named else None
