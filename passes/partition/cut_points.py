"""Cut points: the places between forward operations at which a model can be cut into stages."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from zbcompile.passes.capture.backward_marks import forward_number
from zbcompile.passes.cost.node_cost import node_flops
from zbcompile.passes.graph.fx import is_random, is_view, operator_name, tensors_of
from zbcompile.passes.graph.process_groups import is_running
from zbcompile.passes.graph.storage import storage_bytes
from zbcompile.passes.step_graph import StepGraph

_LARGE = 1 << 24  # FLOPs of a product whose result is worth sending instead of computing again
PARAMETER, BATCH, STATE = "parameter", "batch", "state"  # kinds of values that a node depends on


@dataclass(frozen=True)
class ForwardLine:
    """The forward operations of a step, sorted by how they are assigned to stages.

    Attributes:
        nodes: Operations of exactly one stage. A cut divides this list into stages.
        free: Operations that every stage computes for itself: masks, position tables, views and
            casts of parameters.
        homes: Operations on trained parameters alone. They run on the lowest stage that reads them.
        cuts: Numbers of nodes before each possible cut.
        crossing_bytes: Bytes that cross the cut before node i, for one microbatch.
    """

    nodes: tuple[Node, ...]
    free: Mapping[Node, None]
    homes: tuple[Node, ...]
    cuts: tuple[int, ...]
    crossing_bytes: tuple[int, ...]


def forward_line(step: StepGraph) -> ForwardLine:
    """Returns the forward operations of a step as a line with the places where it can be cut."""
    forward = step.forward_nodes()
    free, homes, by_parameters = _unplaced_nodes(step, forward)
    unplaced = {**free, **homes}
    nodes = [node for node in forward if node not in unplaced]
    position = {node: index for index, node in enumerate(nodes)}
    last_use = {
        node: max((position[user] for user in node.users if user in position), default=-1)
        for node in nodes
    }
    forbidden = _indivisible(step, nodes, position)
    for name, update in step.buffer_updates.items():
        touching = (*step.buffers[name].users, update)
        touched = [position[node] for node in touching if node in position]
        forbidden.update(range(min(touched, default=0), max(touched, default=0)))
    for node in by_parameters:  # without its dropout or power iteration, evaluation cannot cut here
        users = (position[user] for user in node.users if user in position)
        forbidden.update(range(position[node], min(users, default=0)))
    cuts, crossing_bytes = [], [0]
    live: dict[Node, None] = {}
    for index, node in enumerate(nodes[:-1]):
        live = {value: None for value in (*live, node) if last_use[value] > index}
        crossing_bytes.append(storage_bytes(live))
        full = not is_view(node) or operator_name(node) == "detach"
        tensors = all(isinstance(value.meta.get("val"), torch.Tensor) for value in live)
        running = any(map(is_running, live))  # another rank could not wait for it
        if index not in forbidden and live and tensors and full and not running:
            cuts.append(index + 1)
    return ForwardLine(tuple(nodes), free, tuple(homes), tuple(cuts), tuple(crossing_bytes))


def _unplaced_nodes(
    step: StepGraph, forward: list[Node]
) -> tuple[dict[Node, None], dict[Node, None], list[Node]]:
    """Returns the free nodes, the nodes with a home, and of the other nodes those that depend on
    parameters and not on the batch: by random numbers, or by a buffer that the step writes."""
    results = {node for _, node in step.results()}
    kinds: dict[Node, frozenset[str]] = {
        **dict.fromkeys(step.parameters.values(), frozenset({PARAMETER})),
        **dict.fromkeys(step.batch_inputs.values(), frozenset({BATCH})),
        **dict.fromkeys(step.updated_buffers, frozenset({STATE})),
    }
    if step.vocabulary_values.lookup is not None:
        kinds[step.vocabulary_values.lookup] = frozenset({STATE, BATCH})  # the first stage gets it
    free: dict[Node, None] = {}
    homes: dict[Node, None] = {}
    by_parameters: list[Node] = []
    for node in forward:
        inputs = node.all_input_nodes
        kinds[node] = frozenset().union(*(kinds.get(source, frozenset()) for source in inputs))
        placed = [n for n in inputs if n.op == "call_function" and n not in free]
        on_line = any(source not in homes for source in placed)
        if is_random(node) or node in results or on_line or STATE in kinds[node]:
            if PARAMETER in kinds[node] and BATCH not in kinds[node]:
                by_parameters.append(node)
            continue
        if PARAMETER not in kinds[node]:
            if node_flops(node) <= _LARGE:
                free[node] = None
        elif BATCH not in kinds[node]:
            if not placed and (is_view(node) or operator_name(node) in ("_to_copy", "detach")):
                free[node] = None
            else:
                homes[node] = None
    return free, homes, by_parameters


def _indivisible(step: StepGraph, nodes: list[Node], position: Mapping[Node, int]) -> set[int]:
    """Returns the positions after which no cut is possible.

    The backward of a grad_fn runs on one stage. Its forward nodes stay together if they read
    trained parameters or are saved for the backward.
    """
    forbidden: set[int] = set()
    trained = {step.parameters[name] for name in step.gradients}
    backward = step.backward_nodes()
    numbers = {forward_number(node) for node in backward}
    first_of: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if operator_name(node) == "getitem" and node.args[0] in position:
            forbidden.update(range(position[node.args[0]], index))  # type: ignore[index]
        number = node.meta.get("seq_nr")
        if number not in numbers or number is None:
            continue
        first = first_of.setdefault(number, index)
        saved = any(user in backward for user in node.users)
        if saved or operator_name(node) == "getitem" or trained & set(node.all_input_nodes):
            forbidden.update(range(first, index))
    hidden = step.vocabulary_values.hidden
    if hidden is not None and hidden in position:
        forbidden.update(range(position[hidden], len(nodes)))
    large = [i for i, node in enumerate(nodes) if any(t.numel() > 1 for t in tensors_of(node))]
    forbidden.update(range(max(large, default=0), len(nodes)))  # what follows is the loss
    return forbidden
