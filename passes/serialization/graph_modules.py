"""A piece - one executable graph with the meaning of its inputs and outputs - as data, and back.

Nothing in the data is executed: operations are named, and a name that is not in a closed table is refused. Names end up
in generated source, so they must be names that mean nothing else there. Tensors that a graph refers to are kept apart,
by name.
"""

import builtins
import keyword
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast, get_args

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.process_groups import is_collective
from zbcompile.passes.graph.roles import Kind, Slot
from zbcompile.passes.graph.source_location import Origin, origin_of
from zbcompile.passes.serialization.arguments import argument_from_data, argument_to_data
from zbcompile.passes.serialization.operators import is_foreign, name_of_operator, operator_named
from zbcompile.passes.serialization.values import ValueReader, ValueWriter, require_true_values
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.torch_private import LazyGraphModule, OpOverload, arguments_of, result_types

Data = dict[str, Any]
NODES = ("placeholder", "get_attr", "call_function", "output")


@dataclass(frozen=True)
class GraphReading:
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


def piece_from_data(name: str, data: Data, reading: GraphReading, prefix: str, class_name: str) -> Piece:
    """The piece that `piece_to_data` wrote; its tensors are those of `reading` whose names begin with `prefix`.

    Raises CompileError for a graph that no release writes; KeyError, TypeError or ValueError for data of another form.
    """
    inputs, outputs = (tuple(map(_slot_from_data, data[key])) for key in ("inputs", "outputs"))
    module = _graph_from_data(data, reading, prefix, class_name)
    takes, gives = module.graph.find_nodes(op="placeholder"), output_values(module.graph)
    if (len(takes), len(gives)) != (len(inputs), len(outputs)):
        raise CompileError(
            f"{name} takes {len(takes)} and returns {len(gives)} values, but names {len(inputs)} and {len(outputs)}."
        )
    for slot, node in zip(inputs, takes, strict=True):
        node.meta["slot"] = slot
    return Piece(name, module, inputs, outputs)


def _slot_from_data(data: Any) -> Slot:
    slot = Slot(*data)
    if slot.kind not in get_args(Kind) or not isinstance(slot.name, str):
        raise CompileError(f"{data!r} is no input or output of a graph; expected a kind and a name.")
    return slot


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


def _graph_from_data(data: Data, reading: GraphReading, prefix: str, class_name: str) -> GraphModule:
    graph, values = Graph(), ValueReader(data["storages"], reading.device)
    nodes: dict[str, Node] = {}
    held: dict[str, Any] = {}
    _require_order([each["op"] for each in data["nodes"]])
    for each in data["nodes"]:
        node = _node_from_data(each, graph, nodes, reading)
        nodes[node.name] = node
        _remember(node, each, values)
        if node.op == "get_attr":
            held[str(node.target)] = _attribute(data, str(node.target), reading, prefix)
    module = LazyGraphModule(held, graph, class_name=class_name)
    require_true_values(module, values.mode)
    return module


def _require_order(kinds: list[Any]) -> None:
    """A graph ends with its only output; its inputs come first."""
    for kind in kinds:
        if kind not in NODES:
            raise CompileError(f"a node of kind {kind!r}; expected one of {', '.join(NODES)}.")
    inputs = kinds.count("placeholder")
    if kinds[:inputs].count("placeholder") != inputs or kinds.count("output") != 1 or kinds[-1] != "output":
        raise CompileError("a graph whose inputs do not stand first, or that does not end with its only output.")


def _attribute(data: Data, name: str, reading: GraphReading, prefix: str) -> Any:
    if name in data["graphs"]:
        inner = _graph_from_data(data["graphs"][name], reading, f"{prefix}{name}.", "Inner")
        if any(map(is_collective, inner.graph.nodes)):
            raise CompileError(f"{name} is a branch, and communicates: not all ranks need take it.")
        return inner
    if prefix + name not in reading.tensors:
        raise CompileError(f"a graph refers to {prefix + name!r}, and no tensor or graph is called so.")
    return reading.tensors[prefix + name]


def _node_from_data(data: Data, graph: Graph, nodes: Mapping[str, Node], reading: GraphReading) -> Node:
    op, target = data["op"], data.get("target", "output")
    if op == "call_function":
        target = operator_named(target, reading.foreign)
        named = {name: argument_from_data(each, nodes, reading.device) for name, each in data.get("kwargs", {}).items()}
        _require_keywords(target, named)
    else:
        named = {}
        require_name(target, *(dir(_empty_module()) if op == "get_attr" else ()))
    if op in ("placeholder", "get_attr") and not data.keys().isdisjoint(("args", "kwargs")):
        raise CompileError(f"{target!r} is an input or an attribute, and has arguments.")
    args = tuple(argument_from_data(each, nodes, reading.device) for each in data.get("args", ()))
    if op == "output" and not _is_flat(args):
        raise CompileError("a graph returns something else than a list of values.")
    require_name(data["name"])
    node = graph.create_node(op, target, args, named, name=data["name"])
    if node.name != data["name"]:
        raise CompileError(f"two operations of a graph are called {data['name']!r}, or it is a name of generated code.")
    return node


_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # Python takes letters that look alike for one name
_GLOBAL = ("self", "args_list", "torch", "device", "operator", "slice", "inf", "nan", "NoneType", "pytree", "fx_pytree")
_TAKEN = frozenset((*keyword.kwlist, *_GLOBAL, *(name for name in dir(builtins) if name.startswith("__"))))


def require_name(name: Any, *taken: str) -> None:
    """Raise CompileError for a name that must not appear in generated code: it is none, or means something there."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TAKEN or name in taken:
        raise CompileError(f"{name!r} in a graph is not a name that a program may use.")


@cache
def _empty_module() -> GraphModule:
    """A module whose attributes a graph's own must not replace."""
    return GraphModule(torch.nn.Module(), Graph())


def _require_keywords(target: Any, named: Collection[str]) -> None:
    declared = [argument.name for argument in arguments_of(target)] if isinstance(target, OpOverload) else ()
    for name in named:
        if name not in declared or keyword.iskeyword(name):
            raise CompileError(f"{target} is called with {name!r} in a graph, which is not a name of its arguments.")


def _is_flat(args: tuple[Any, ...]) -> bool:
    """Whether these are the arguments of an output: one list of nodes and constants."""
    plain = (Node, bool, int, float, type(None))
    return len(args) == 1 and all(
        isinstance(e, plain) for e in (args[0] if isinstance(args[0], tuple | list) else args)
    )


def _remember(node: Node, data: Data, values: ValueReader) -> None:
    """Restore the entries of a node's meta that passes and reports read."""
    if "value" in data:
        node.meta["val"] = values.read(data["value"])
    elif isinstance(node.target, OpOverload) and not result_types(node.target):
        node.meta["val"] = None  # it is there, as after compiling
    if "pass" in data:
        node.meta["pass"] = on_a_line(data["pass"])
    if "origin" in data:
        module, file, line, code = data["origin"]
        node.meta["origin"] = Origin(on_a_line(module), on_a_line(file), int(line), on_a_line(code))


def on_a_line(text: Any) -> str:
    """A string for messages and for comments in generated code: without line breaks and control characters."""
    if not isinstance(text, str):
        raise CompileError(f"{text!r} stands where a text is expected.")
    return "".join(each if each.isprintable() else " " for each in text)
