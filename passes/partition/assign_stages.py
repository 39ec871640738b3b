"""Stages: which stage computes each node of a training step."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence

import torch
from torch.fx import Node

from zbcompile.passes.capture.backward_marks import forward_number
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.fx import operator_name, reached
from zbcompile.passes.partition.cut_points import ForwardLine
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.torch_private import ANNOTATIONS, annotations_of

Stages = dict[Node, int]


def assign_stages(step: StepGraph, line: ForwardLine, cuts: Sequence[int]) -> Stages:
    """Returns the stage of every node except the free ones.

    A backward node belongs to the stage of its forward node. A sum of gradients, or a node whose
    forward node is free, belongs to the lowest stage of its operands: gradients flow from later
    stages to earlier ones.
    """
    stages: Stages = {node: bisect_right(cuts, index) for index, node in enumerate(line.nodes)}
    last_stage = len(cuts)
    _assign_homes(line, stages)
    stage_of_number: dict[int, int] = {}
    for node in (*line.nodes, *line.homes):
        stage_of_number.setdefault(node.meta.get("seq_nr", -1), stages[node])
    backward = step.backward_nodes()
    for node in backward:
        operands = [stages[source] for source in node.all_input_nodes if source in backward]
        lowest = min(operands, default=last_stage)
        number = forward_number(node)
        stage = stage_of_number.get(-1 if number is None else number, lowest)
        if stage > lowest:
            raise AssertionError(
                f"{node.name} of stage {stage} reads a gradient of stage {lowest}: a gradient "
                "would flow to a later stage"
            )
        stages[node] = stage
    return stages


def keep_updated_buffers(step: StepGraph, stages: Stages) -> None:
    """Makes the backward read a copy of every buffer that the step writes.

    Later microbatches run their forward, and write the buffer, before the backward of this one.
    """
    backward = step.backward_nodes()
    for name, update in step.buffer_updates.items():
        holder = step.buffers[name]
        readers = [node for node in holder.users if node in backward]
        if not readers:
            continue
        first = next(iter(step.calls()))
        with step.graph.inserting_before(first):
            copy = step.graph.call_function(torch.ops.aten.clone.default, (holder,))
        copy.meta = {"val": holder.meta["val"], ANNOTATIONS: dict(annotations_of(update))}
        stages[copy] = stages[update]
        for node in readers:
            node.replace_input_with(holder, copy)


def cuts_of_owners(
    step: StepGraph, line: ForwardLine, owners: Mapping[str, Sequence[int]], stages: int
) -> tuple[int, ...]:
    """Returns the cuts that keep every parameter and buffer on the stages that `owners` lists.

    Used for a further program of the same model, such as another batch shape. Between the last
    node that reads a parameter of stage s or below and the first that reads one above s, the
    cut with the fewest crossing bytes is chosen. Of a parameter on several stages the first and
    the last reader are known, of one that operations on parameters alone read the first.

    Raises:
        PartitionError: The parameters are read in another order than the owners' stages.
    """
    tensors = {**step.parameters, **step.buffers}
    parameters = {tensors[name] for name in owners}

    def readers_through(through: Container[Node]) -> dict[Node, list[int]]:
        readers: dict[Node, list[int]] = defaultdict(list)
        for index, node in enumerate(line.nodes):
            sources = reached(
                node.all_input_nodes, lambda node: node.all_input_nodes if node in through else ()
            )
            for parameter in parameters & sources.keys():
                readers[parameter].append(index)
        return readers

    readers = readers_through(line.free)
    home_readers = readers_through({*line.free, *line.homes})
    reads: list[tuple[int, int]] = []
    shared: list[tuple[int, int]] = []  # of parameters that several stages have
    for name, owner in owners.items():
        indices = readers.get(tensors[name], [])
        if len(owner) == 1 and indices:
            reads += [(index, owner[0]) for index in indices]
        elif owner and len(set(indices)) > 1:  # a single read may be on any of the owners
            shared += [(indices[0], owner[0]), (indices[-1], owner[-1])]
        elif owner and not indices and tensors[name] in home_readers:
            reads.append((home_readers[tensors[name]][0], owner[0]))
    try:
        return _cuts_between(line, [*reads, *shared], stages)
    except PartitionError:  # both reads of a shared parameter may be on one of its stages
        return _cuts_between(line, reads, stages)


def _cuts_between(
    line: ForwardLine, reads: Sequence[tuple[int, int]], stages: int
) -> tuple[int, ...]:
    """Returns the cuts with the fewest bytes that have every read, `(position, stage)`, there."""
    cuts: list[int] = []
    for stage in range(stages - 1):
        low = max((index for index, place in reads if place <= stage), default=-1)
        high = min((index for index, place in reads if place > stage), default=len(line.nodes))
        places = [cut for cut in line.cuts if max(low, *cuts, 0) < cut <= high]
        if not places:
            raise PartitionError(
                f"no cut keeps the parameters and buffers of stages 0 to {stage} before those of "
                "later stages: the model reads its parameters in another order than when it was "
                "placed. Keep the order, or make a new pipeline, which places them again."
            )
        cuts.append(min(places, key=lambda cut: (line.crossing_bytes[cut], cut)))
    return tuple(cuts)


def _assign_homes(line: ForwardLine, stages: Stages) -> None:
    """Assigns operations on parameters alone to the lowest stage that reads them.

    Results that only the backward reads, and parts of tuples, follow the operation they belong to.
    """
    for node in reversed(line.homes):
        readers = [stages[user] for user in node.users if user in stages]
        if readers:
            stages[node] = min(readers)
    for node in line.homes:
        sources = [stages[source] for source in node.all_input_nodes if source in stages]
        if operator_name(node) == "getitem" or node not in stages:
            stages[node] = max(sources, default=0)
