"""A check that log-probabilities are computed from logits of all words."""

from collections.abc import Collection

from torch.fx import Node

from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import operator_name
from zbcompile.passes.graph.process_groups import is_collective
from zbcompile.passes.step_graph import StepGraph

PART_OF_LOGITS = (
    "the logits are this rank's part of them, by its part of {parameter}; a distribution needs all "
    "words. Gather them in forward, or return the DTensor (use_local_output=False)."
)


def require_whole_logits(step: StepGraph, sharded: Collection[str]) -> None:
    """Raises CaptureError if a softmax is over the words of this rank alone: if its part of a
    parameter in `sharded` makes the logits, without an exchange in between."""
    parameters = {node: name for name, node in step.parameters.items()}
    for node in step.calls():
        if operator_name(node) not in ("_log_softmax", "_softmax"):
            continue
        for source in _origin(node.all_input_nodes[0]).all_input_nodes:
            name = parameters.get(_origin(source))
            if name in sharded:
                raise CaptureError(PART_OF_LOGITS.format(parameter=name))


def _origin(node: Node) -> Node:
    """Returns the node behind operations with one input."""
    while len(node.all_input_nodes) == 1 and not is_collective(node):
        (node,) = node.all_input_nodes
    return node
