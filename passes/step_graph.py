"""The step graph: an exported training step whose inputs and outputs are found by role and name."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.capture.structures import OutputStructure
from zbcompile.passes.graph.fx import copy_graph, is_random
from zbcompile.passes.graph.roles import (
    ACTIVATION,
    BATCH,
    BUFFER,
    BUFFER_UPDATE,
    CONSTANT,
    FITS,
    GRADIENT,
    LOSS,
    OUTPUT,
    PARAMETER,
    TANGENT,
    WEIGHT_GRADIENT,
    Role,
    Slot,
)
from zbcompile.passes.graph.source_location import LINE, line_of
from zbcompile.passes.torch_private import ANNOTATIONS, LazyGraphModule, pytree


class Label(NamedTuple):
    """The stage and the kind of the pass that run a node."""

    stage: int
    kind: str

    def __str__(self) -> str:
        return f"{self.stage}.{self.kind}"


FORWARD, BACKWARD, WEIGHT = "F", "B", "W"
END = "E"  # after the last microbatch of a step: adds gradients of several stages
Labels = dict[Node, Label]


@dataclass
class VocabularyValues:
    """Values that stages exchange with the shards of the output layer and embedding.

    Attributes:
        hidden: The input of the output layer, [rows, width]; the last stage's F returns it.
        hidden_gradient: Placeholder of its gradient, which the last stage's B receives.
        lookup: Placeholder of the rows of a sharded embedding, [rows, width], which the first
            stage's F receives.
        lookup_gradient: Their gradient; the first stage's B returns it.
    """

    hidden: Node | None = None
    hidden_gradient: Node | None = None
    lookup: Node | None = None
    lookup_gradient: Node | None = None

    def results(self) -> Iterator[Node]:
        """Yields what stages send to shards."""
        yield from (node for node in (self.hidden, self.lookup_gradient) if node is not None)


@dataclass
class StepGraph:
    """A training step as a functional graph of ATen operations.

    Passes before `extract` label the nodes of `graph`, replace or duplicate them.

    Attributes:
        module: Owner of the graph and of the subgraphs that it calls.
        parameters: Placeholders by the user's names. Tied parameters have one placeholder.
        buffers: Placeholders of the model's buffers by name.
        constants: Placeholders of tensors made in forward, by name.
        constant_values: Their values.
        batch_inputs: Placeholders of the batch by path: `args[0]`, `kwargs['mask']`, `target`.
        tangent: Placeholder of the gradient of the loss; None for a forward alone.
        loss: The node that computes the loss; None for a forward alone.
        gradients: The node of each trained parameter's gradient, None if it has none.
        buffer_updates: The node of the new value of each buffer that the step writes.
        outputs: Tensors of the model's output and of the metrics. None: a vocabulary shard
            computes it.
        fits: Whether the tokens of each exchange between experts have room in it.
        stage_gradients: For gradients that are summed over stages after the step, by name and
            stage: the stage's own sum. Such gradients are not in `gradients`.
        deferred_sums: The mesh dimension over which a gradient is summed once, after the step.
        output_structure: Of (output, metrics), whose tensors are `outputs`.
        tied_names: Maps every further name of a tied tensor to its first name.
        changed_state: Paths of the module state that forward changes, such as `model.calls`.
        inexact_calls: Sentences about what has other bits than eager mode.
        unused_outputs: Names of what forward returns besides its loss.
        shardings: Mesh and placements of parameters and buffers that are DTensors.
        gradient_placements: Placements of the gradients of such parameters, which may differ from
            the parameter's: `Partial` gradients are summed over the mesh after the step.
        process_groups: The name in this process of every process group, by its name in the graph.
        vocabulary_values: What stages and vocabulary shards exchange; nothing unless the output
            layer is cut off this step.
    """

    module: GraphModule
    parameters: dict[str, Node]
    buffers: dict[str, Node]
    constants: dict[str, Node]
    constant_values: dict[str, Any]
    batch_inputs: dict[str, Node]
    tangent: Node | None
    loss: Node | None
    gradients: dict[str, Node | None]
    buffer_updates: dict[str, Node]
    outputs: list[Node | None]
    fits: list[Node] = field(default_factory=list)
    stage_gradients: dict[str, dict[int, Node]] = field(default_factory=dict)
    deferred_sums: dict[str, str] = field(default_factory=dict)
    output_structure: OutputStructure | None = None
    tied_names: Mapping[str, str] = field(default_factory=dict)
    changed_state: frozenset[str] = frozenset()
    inexact_calls: tuple[str, ...] = ()
    unused_outputs: tuple[str, ...] = ()
    shardings: Mapping[str, Any] = field(default_factory=dict)
    gradient_placements: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    process_groups: Mapping[str, str] = field(default_factory=dict)
    vocabulary_values: VocabularyValues = field(default_factory=VocabularyValues)

    @property
    def graph(self) -> Graph:
        return self.module.graph

    @property
    def updated_buffers(self) -> set[Node]:
        """Returns the placeholders of the buffers that the step writes."""
        return {self.buffers[name] for name in self.buffer_updates}

    def calls(self) -> list[Node]:
        """Returns the operations in the order of the trace."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def device_type(self) -> str:
        """Returns the type of the device of the parameters; "cpu" without any."""
        tensors = (node.meta["val"] for node in self.parameters.values())
        return next((tensor.device.type for tensor in tensors), "cpu")

    def forward_nodes(self) -> list[Node]:
        """Returns the operations of the forward and of the loss, in order."""
        backward = self.backward_nodes()
        return [node for node in self.calls() if node not in backward]

    def backward_nodes(self) -> dict[Node, None]:
        """Returns the operations of the backward, in order.

        The backward begins with the first operation on the tangent, or on what the shards of the
        output layer send back.
        """
        calls = self.calls()
        starts = {self.tangent, self.vocabulary_values.hidden_gradient}
        begin = next(
            (i for i, node in enumerate(calls) if not starts.isdisjoint(node.all_input_nodes)),
            len(calls),
        )
        return dict.fromkeys(calls[begin:])

    def batch_values(self) -> set[Node]:
        """Returns all nodes that are computed from more than parameters, buffers and constants."""
        state = {*self.parameters.values(), *self.buffers.values(), *self.constants.values()}
        computed = set(self.graph.find_nodes(op="placeholder")) - state
        for node in self.calls():
            if not computed.isdisjoint(node.all_input_nodes):
                computed.add(node)
        return computed

    def inputs(self) -> dict[Node, Slot]:
        """Returns the slots of the placeholders."""
        shards = self.vocabulary_values
        inputs = [
            *_slots(PARAMETER, self.parameters.items()),
            *_slots(BUFFER, self.buffers.items()),
            *_slots(CONSTANT, self.constants.items()),
            *_slots(BATCH, self.batch_inputs.items()),
            (Slot(TANGENT, "loss"), self.tangent),
            _named_by_node(GRADIENT, shards.hidden_gradient),
            _named_by_node(ACTIVATION, shards.lookup),
        ]
        return {node: slot for slot, node in inputs if node is not None}

    def results(self) -> list[tuple[Slot, Node]]:
        """Returns the slots of what the step returns. A gradient that is summed over stages after
        the step has a sum for each."""
        shards = self.vocabulary_values
        results = [
            (Slot(LOSS, "loss"), self.loss),
            *_slots(OUTPUT, enumerate(self.outputs)),
            *_slots(FITS, enumerate(self.fits)),
            _named_by_node(ACTIVATION, shards.hidden),
            _named_by_node(GRADIENT, shards.lookup_gradient),
            *_slots(BUFFER_UPDATE, self.buffer_updates.items()),
            *_slots(WEIGHT_GRADIENT, self.gradients.items()),
            *(
                (Slot(WEIGHT_GRADIENT, name), node)
                for name, sums in self.stage_gradients.items()
                for node in sums.values()
            ),
        ]
        return [(slot, node) for slot, node in results if node is not None]

    def copy(self) -> "StepGraph":
        """Returns a copy with another graph, so that one export serves several placements."""
        copies: dict[Node, Node] = {}
        graph = copy_graph(self.graph, copies)
        values = {**vars(self), "vocabulary_values": vars(self.vocabulary_values)}
        values = pytree.tree_map_only(Node, copies.__getitem__, values)
        values["module"] = LazyGraphModule(self.module, graph, class_name="Step")
        values["vocabulary_values"] = VocabularyValues(**values["vocabulary_values"])
        return StepGraph(**values)

    def insert_sum(self, first: Any, second: Any, before: Node) -> Node:
        """Inserts the sum of two gradients before a node, and returns it."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(torch.ops.aten.add.Tensor, (first, second))
        node.meta = {"val": second.meta["val"], ANNOTATIONS: {LINE: line_of(second)}}
        return node

    def remove_dead_nodes(self) -> None:
        """Removes operations without readers, except random ones, which move the generator, and
        collectives."""
        for node in reversed(self.calls()):
            if not node.users and not (is_random(node) or "c10d" in str(node.target)):
                self.graph.erase_node(node)

    def refresh_output(self) -> None:
        """Writes the results by role into the graph's output node, after a pass replaced nodes."""
        self.graph.output_node().args = (tuple(node for _, node in self.results()),)


def _slots(
    role: Role, named: Iterable[tuple[object, Node | None]]
) -> Iterator[tuple[Slot, Node | None]]:
    return ((Slot(role, str(name)), node) for name, node in named)


def _named_by_node(role: Role, node: Node | None) -> tuple[Slot, Node | None]:
    return Slot(role, str(node)), node
