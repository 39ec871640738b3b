"""A piece - one executable graph with the meaning of its inputs and outputs - as data, and back.

Nothing in the data is executed: operations are named, and a name that is not on the allow-list is refused. Names end up
in generated source, so they must be identifiers. Tensors that a graph refers to are kept apart, by name.
"""

import operator
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.source_location import Origin, origin_of
from zbcompile.passes.serialization.arguments import argument_from_data, argument_to_data
from zbcompile.passes.serialization.values import ValueReader, ValueWriter, require_true_values
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.torch_private import (
    FUNCTIONAL_COLLECTIVES,
    HigherOrderOperator,
    LazyGraphModule,
    OpOverload,
    arguments_of,
    returns_tensors,
)

OWN_LIBRARIES = ("aten", "prims", "zbcompile", *FUNCTIONAL_COLLECTIVES)
HIGHER_ORDER = ("cond",)
GETITEM = "getitem"
CHECKS = ("_assert_async", "_assert_scalar", "_assert_tensor_metadata")  # return nothing, and change nothing
SILENT = (*CHECKS, "end_apart")  # return nothing
_NAME = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*\.[A-Za-z_]\w*")  # library.operator.overload


def name_of_operator(target: Any) -> str:
    """The name under which a graph's target is written, such as `aten.linear.default`.

    Raises CompileError for a function that no reader could find by name.
    """
    if target is operator.getitem:
        return GETITEM
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator) and target.name() in HIGHER_ORDER:
        return f"higher_order.{target.name()}"
    raise CompileError(
        f"{target} cannot be saved: a program holds aten, prims and library operators, getitem and "
        f"{', '.join(HIGHER_ORDER)}. Wrap it with torch.library.custom_op."
    )


def is_foreign(name: str) -> bool:
    """Whether an operator belongs to a library other than torch's own, so that a reader must name it."""
    return name != GETITEM and name.partition(".")[0] not in (*OWN_LIBRARIES, "higher_order")


def operator_named(name: str, foreign: Collection[str] = ()) -> Callable[..., Any]:
    """The operator that `name_of_operator` wrote. `foreign` are the names of other libraries' operators that may be
    called, without the overload: `mylibrary::scale`.

    Raises CompileError for everything else, whether it exists or not.

    >>> operator_named("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    if name == GETITEM:
        return operator.getitem
    if name in {f"higher_order.{allowed}" for allowed in HIGHER_ORDER}:
        return getattr(torch.ops.higher_order, name.partition(".")[2])  # type: ignore[no-any-return]
    if not _NAME.fullmatch(name):
        raise CompileError(f"{name!r} is not the name of an operator; expected library.operator.overload.")
    library, function, overload = name.split(".")
    if library not in OWN_LIBRARIES and f"{library}::{function}" not in foreign:
        raise CompileError(
            f"the program calls {library}::{function}, which is not an operator of torch. If you trust it, import the "
            f'module that defines it and pass operators=["{library}::{function}"].'
        )
    found = _found(library, function, overload)
    if library in OWN_LIBRARIES and function not in SILENT:
        _require_pure(name, found)
    return found  # type: ignore[no-any-return]


def _found(library: str, function: str, overload: str) -> Any:
    try:
        return getattr(getattr(getattr(torch.ops, library), function), overload)
    except AttributeError:
        raise CompileError(
            f"the program calls {library}::{function} ({overload}), which is not defined here. Import the module that "
            "defines it before loading."
        ) from None


def _require_pure(name: str, found: Any) -> None:
    """Refuse operators of aten that map files, or have effects besides the tensors that they return or write."""
    if (
        not isinstance(found, OpOverload)
        or any(argument.name == "filename" for argument in arguments_of(found))
        or not returns_tensors(found)
        or torch.Tag.inplace_view in found.tags
    ):
        raise CompileError(f"{name} is not an operator that a program may call.")


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
