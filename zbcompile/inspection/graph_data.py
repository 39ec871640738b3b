"""The graphs of a program as plain data, for JSON and the HTML page."""

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from zbcompile.passes.graph.fx import is_getitem, output_values
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.graph.storage import is_view
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.print_python import describe_value
from zbcompile.passes.torch_private import is_in_place
from zbcompile.program.program import Program

PASSES = ("F", "B", "W", "BW")


@dataclass(frozen=True)
class Operation:
    """One operation of a graph: the module and line of the model it is from, or the pass of the compiler that made it.

    `inputs` are names of operations or of the graph's inputs; `value` is type and size; `effect` is "view", "in place"
    or "".
    """

    name: str
    operator: str
    inputs: tuple[str, ...]
    value: str
    effect: str
    module: str
    line: str
    made_by: str


@dataclass(frozen=True)
class Boundary:
    """One input or output of a graph: `meaning` is its slot, such as `saved t_1`, `node` the node for it."""

    meaning: str
    node: str
    value: str


@dataclass(frozen=True)
class Graph:
    """One pass of one stage."""

    stage: int
    name: str
    flops: int
    inputs: tuple[Boundary, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Boundary, ...]


def graph_of(program: Program, stage: int, name: str) -> Graph:
    """The pass `name` ("F", "B", "W" or "BW") of a stage."""
    piece = program.stages[stage].pieces[name]
    graph = piece.module.graph
    holders = graph.find_nodes(op="placeholder")
    inputs = tuple(_boundary(str(slot), node) for slot, node in zip(piece.inputs, holders, strict=True))
    outputs = tuple(_boundary(str(slot), node) for slot, node in zip(piece.outputs, output_values(graph), strict=True))
    operations = tuple(_operation(node) for node in graph.nodes if node.op == "call_function")
    return Graph(stage, name, program.stages[stage].flops[name], inputs, operations, outputs)


def crossing_values(first: Piece, second: Piece) -> list[Boundary]:
    """The values that one pass of a stage saves for another."""
    wanted = {str(slot) for slot in second.inputs}
    pairs = zip(first.outputs, output_values(first.module.graph), strict=True)
    return [_boundary(slot.name, node) for slot, node in pairs if slot.kind == "saved" and str(slot) in wanted]


def _boundary(meaning: str, value: Any) -> Boundary:
    if not isinstance(value, Node):
        return Boundary(meaning, repr(value), "")
    return Boundary(meaning, value.name, describe_value(value.meta.get("val")))


def _operation(node: Node) -> Operation:
    origin = origin_of(node)
    effect = "in place" if is_in_place(node.target) else "view" if not is_getitem(node) and is_view(node) else ""
    return Operation(
        name=node.name,
        operator="getitem" if is_getitem(node) else str(node.target),
        inputs=tuple(argument.name for argument in node.all_input_nodes),
        value=describe_value(node.meta.get("val")),
        effect=effect,
        module=origin.owner if origin else "",
        line=origin.text if origin else "",
        made_by=str(node.meta.get("pass", "")),
    )
