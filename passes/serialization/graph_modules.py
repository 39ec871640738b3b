"""A piece - one executable graph with the meaning of its inputs and outputs - as data, and back.

Nothing in the data is executed: operations are named, and a name that is not on the allow-list is refused. Names end up
in generated source, so they must be identifiers. Tensors that a graph refers to are kept apart, by name.
"""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.source_location import Origin, origin_of
from zbcompile.passes.serialization.arguments import argument_from_data, argument_to_data
from zbcompile.passes.serialization.operators import is_foreign, name_of_operator, operator_named
from zbcompile.passes.serialization.true_values import require_true_values
from zbcompile.passes.serialization.values import ValueReader, ValueWriter
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.torch_private import LazyGraphModule

Data = dict[str, Any]
NODES = ("placeholder", "get_attr", "call_function", "output")


@dataclass(frozen=True)
class Reading:
    """The context for reading graphs: this process's device, the tensors that they refer to, and the operators of
    other libraries that they may call (see `operator_named`)."""

    device: torch.device
    tensors: Mapping[str, torch.Tensor]
    foreign: Collection[str] = ()


def piece_to_data(piece: Piece) -> Data:
    """A piece as JSON values. Raises CompileError for an operation or argument that has no such form."""
    return {
        "inputs": [list(slot) for slot in piece.inputs],
        "outputs": [list(slot) for slot in piece.outputs],
        **_graph_to_data(piece.module),
    }


def piece_from_data(name: str, data: Data, reading: Reading, prefix: str, class_name: str) -> Piece:
    """The piece that `piece_to_data` wrote; its tensors are those of `reading` whose names begin with `prefix`."""
    inputs, outputs = (tuple(Slot(*slot) for slot in data[key]) for key in ("inputs", "outputs"))
    module = _graph_from_data(data, reading, prefix, class_name)
    for slot, node in zip(inputs, module.graph.find_nodes(op="placeholder"), strict=True):
        node.meta["slot"] = slot
    return Piece(name, module, inputs, outputs)


def tensors_in(module: torch.nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors that a graph and the graphs inside it refer to, by name prefixed with `prefix`."""
    found: dict[str, torch.Tensor] = {}
    for node in cast(GraphModule, module).graph.find_nodes(op="get_attr"):
        value = getattr(module, node.target)
        inside = isinstance(value, GraphModule)
        found |= tensors_in(value, f"{prefix}{node.target}.") if inside else {f"{prefix}{node.target}": value}
    return found


def foreign_operators(data: Data) -> set[str]:
    """The operators of other libraries that a written graph calls, as `library::operator`."""
    called = {node["target"] for node in data["nodes"] if node["op"] == "call_function"}
    own = {"::".join(name.split(".")[:2]) for name in called if is_foreign(name)}
    return own.union(*(foreign_operators(inner) for inner in data["graphs"].values()))


def _graph_to_data(module: GraphModule) -> Data:
    values = ValueWriter()
    nodes = [_node_to_data(node, values) for node in module.graph.nodes]
    attributes = dict.fromkeys(node.target for node in module.graph.find_nodes(op="get_attr"))
    held = {name: getattr(module, name) for name in attributes}
    inner = {name: _graph_to_data(value) for name, value in held.items() if isinstance(value, GraphModule)}
    return {"storages": values.bytes, "nodes": nodes, "graphs": inner}


def _node_to_data(node: Node, values: ValueWriter) -> Data:
    data: Data = {"op": node.op, "name": node.name}
    if node.op == "call_function":
        data["target"] = name_of_operator(node.target)
    elif node.op != "output":
        data["target"] = node.target
    if node.op in ("call_function", "output"):
        data["args"] = [argument_to_data(each) for each in node.args]
    if node.kwargs:
        data["kwargs"] = {name: argument_to_data(each) for name, each in node.kwargs.items()}
    value = values.write(node.meta.get("val"))
    known = {"value": value, "pass": node.meta.get("pass"), "origin": _origin_to_data(node)}
    return data | {key: each for key, each in known.items() if each is not None}


def _origin_to_data(node: Node) -> list[Any] | None:
    """The origin of an operation, without the folders of the machine that compiled it."""
    origin = origin_of(node) if node.op == "call_function" else None
    return [origin.module, os.path.basename(origin.file), origin.line, origin.code] if origin else None


def _graph_from_data(data: Data, reading: Reading, prefix: str, class_name: str) -> GraphModule:
    graph, values = Graph(), ValueReader(data["storages"], reading.device)
    nodes: dict[str, Node] = {}
    held: dict[str, Any] = {}
    for each in data["nodes"]:
        nodes[each["name"]] = _node_from_data(each, graph, nodes, reading)
        _remember(nodes[each["name"]], each, values)
        if each["op"] == "get_attr":
            held[each["target"]] = _attribute(data, each["target"], reading, prefix)
    module = LazyGraphModule(held, graph, class_name=class_name)
    require_true_values(module, values.mode)
    return module


def _attribute(data: Data, name: str, reading: Reading, prefix: str) -> Any:
    if name in data["graphs"]:
        return _graph_from_data(data["graphs"][name], reading, f"{prefix}{name}.", "Inner")
    return reading.tensors[prefix + name]


def _node_from_data(data: Data, graph: Graph, nodes: Mapping[str, Node], reading: Reading) -> Node:
    op, kwargs = data["op"], data.get("kwargs", {})
    target = data.get("target", "output")
    for name in (data["name"], *kwargs, *([] if op == "call_function" else [target])):
        if not str(name).isidentifier():
            raise CompileError(f"{name!r} in a graph is not a name.")
    if op not in NODES:
        raise CompileError(f"{data['name']}: a node of kind {op!r}; expected one of {', '.join(NODES)}.")
    if op == "call_function":
        target = operator_named(target, reading.foreign)
    args = tuple(argument_from_data(each, nodes, reading.device) for each in data.get("args", ()))
    named = {name: argument_from_data(each, nodes, reading.device) for name, each in kwargs.items()}
    return graph.create_node(op, target, args, named, name=data["name"])


def _remember(node: Node, data: Data, values: ValueReader) -> None:
    """Restore the entries of a node's meta that passes and reports read."""
    if "value" in data:
        node.meta["val"] = values.read(data["value"])
    if "pass" in data:
        node.meta["pass"] = data["pass"]
    if "origin" in data:
        node.meta["origin"] = Origin(*data["origin"])
