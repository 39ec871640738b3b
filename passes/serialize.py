"""Graphs as JSON: a graph that is read runs no code that is not torch's or this library's.

Inputs are described by dtype, shape, strides and storage. Everything else is inferred when a graph
is read, by one run on fake tensors. Operations are named, and only operators of a closed list may
be called; further ones are allowed by name (`operators=`). Nodes have numbers, so no name of the
file reaches generated code.
"""

import math
import operator
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import tensors_of
from zbcompile.passes.graph.process_groups import is_collective
from zbcompile.passes.graph.source_location import LINE
from zbcompile.passes.graph.storage import byte_range
from zbcompile.passes.operators import name_of_operator, operator_named
from zbcompile.passes.recompute.recompute import RECOMPUTED
from zbcompile.passes.torch_names import NAMED, dtype_named, name_in_torch, named
from zbcompile.passes.torch_private import (
    ANNOTATIONS,
    MODULES,
    FakeTensorMode,
    LazyGraphModule,
    OpOverload,
    annotations_of,
    module_stack,
    storage_key,
)
from zbcompile.passes.torch_private_export import kernel_strides

Data = dict[str, Any]
# Graph compilers copy strings into generated source: none may end a literal.
_TEXT = re.compile(r"[\w ,.:>*+-]*", re.ASCII)
DEVICES = ("cpu", "cuda")
_NUMBERS = {"float": float, "complex": complex}  # those that JSON lacks, by their tags


def graph_to_data(module: GraphModule) -> Data:
    """Returns a graph, with the graphs that it calls, as JSON values.

    Raises:
        CompileError: An operation or an argument has no such form.
    """
    return _Writer(module).write()


def graph_from_data(
    data: Data, device: torch.device, operators: Collection[str] = (), name: str = "Pass"
) -> GraphModule:
    """Returns the graph that `graph_to_data` wrote.

    Args:
        device: The device of this process.
        operators: Operators of other libraries that the graph may call, as `library::operator`.
        name: The name of the module's class.

    Raises:
        CompileError: The graph does something that it may not.
        Exception: The data has another form, or an operation cannot run on its arguments.
    """
    mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    with mode, torch.no_grad(), kernel_strides():
        return _Reader(device, operators).read(data, name)


@dataclass
class _Writer:
    module: GraphModule
    numbers: dict[Node, int] = field(default_factory=dict)
    graphs: list[Data] = field(default_factory=list)

    def write(self) -> Data:
        nodes = []
        for node in self.module.graph.nodes:
            if node.op == "call_function":
                nodes.append(self._node(node))
            if node.op in ("placeholder", "call_function"):
                self.numbers[node] = len(self.numbers)
        results = self.module.graph.output_node().args[0]
        outputs = [self.numbers[node] for node in results]  # type: ignore[index, union-attr]
        data = _inputs_to_data(self.module.graph) | {"nodes": nodes, "outputs": outputs}
        return data | {"graphs": self.graphs}

    def _node(self, node: Node) -> Data:
        data: Data = {"call": name_of_operator(node.target)}
        data["args"] = [self._argument(value) for value in node.args]
        if node.kwargs:
            data["kwargs"] = {name: self._argument(value) for name, value in node.kwargs.items()}
        line = annotations_of(node).get(LINE)
        if line:
            data["line"] = os.path.basename(line)  # without the folders of this machine
        modules = list(module_stack(node).values())
        if modules and modules[-1][0]:
            data["module"] = str(modules[-1][0])
        if node.meta.get(RECOMPUTED):
            data["recomputed"] = True
        return data

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node) and value.op == "get_attr":
            self.graphs.append(graph_to_data(getattr(self.module, str(value.target))))
            return {"graph": len(self.graphs) - 1}
        if isinstance(value, Node):
            return {"node": self.numbers[value]}
        if isinstance(value, str):
            return _text(value)
        if value is None or (isinstance(value, bool | int | float) and math.isfinite(value)):
            return value
        if isinstance(value, list):
            return [self._argument(inner) for inner in value]
        if isinstance(value, tuple):
            return {"tuple": [self._argument(inner) for inner in value]}
        if isinstance(value, float | complex):
            return {type(value).__name__: str(value)}
        if isinstance(value, torch.device):
            return {"device": value.type}
        tagged = name_in_torch(value)
        if tagged is None:
            raise CompileError(f"an argument of type {type(value).__name__} cannot be saved.")
        return dict([tagged])


@dataclass
class _Reader:
    """Builds a graph and runs it on fake tensors."""

    device: torch.device
    operators: Collection[str]
    graph: Graph = field(default_factory=Graph)
    nodes: list[Node] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    storage_bytes: dict[int, int] = field(default_factory=dict)

    def read(self, data: Data, name: str) -> GraphModule:
        self._read_inputs(data)
        for number, inner in enumerate(data["graphs"]):
            branch = _Reader(self.device, self.operators).read(inner, "Branch")
            if any(map(is_collective, branch.graph.nodes)):
                raise CompileError("a branch communicates, and not all ranks need to take it.")
            self.attributes[f"graph_{number}"] = branch
        for node in data["nodes"]:
            self._read_node(node)
        results = tuple(self._node(number) for number in data["outputs"])
        if not all(isinstance(node.meta["val"], Tensor) for node in results):
            raise CompileError("a graph returns something else than tensors.")
        self.graph.output(results)
        return LazyGraphModule(self.attributes, self.graph, class_name=name)

    def _read_inputs(self, data: Data) -> None:
        storages: dict[int, Tensor] = {}
        for number, description in enumerate(data["inputs"]):
            kind, dtype, sizes, strides, storage, offset = description
            dtype = dtype_named(dtype)
            if storage not in storages:
                storages[storage] = torch.empty(
                    _size(data["storages"][storage]), dtype=torch.uint8, device=self._device(kind)
                )
            count = storages[storage].numel() // dtype.itemsize * dtype.itemsize
            flat = storages[storage][:count].view(dtype)
            self._require_inside(flat)
            shape, stride = list(map(_size, sizes)), list(map(_size, strides))
            value = torch.as_strided(flat, shape, stride, _size(offset))
            self._require_inside(value)
            self._append(self.graph.placeholder(f"input_{number}"), value)

    def _read_node(self, data: Data) -> None:
        target = operator_named(data["call"], self.operators)
        args = tuple(self._argument(value) for value in data["args"])
        kwargs = {str(name): self._argument(v) for name, v in data.get("kwargs", {}).items()}
        if kwargs and not isinstance(target, OpOverload):  # an overload refuses other names
            raise CompileError(f"{target} takes no keyword arguments.")
        node = self.graph.call_function(target, args, kwargs)
        self._append(node, self._run(node))
        node.meta[ANNOTATIONS] = {LINE: str(data["line"])} if "line" in data else {}
        if "module" in data:
            node.meta[MODULES] = {"": (str(data["module"]), "")}
        if data.get("recomputed"):
            node.meta |= {RECOMPUTED: True, "pass": "recompute"}

    def _run(self, node: Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        if node.target is operator.getitem:
            values, index = args
            if not isinstance(values, tuple | list) or type(index) is not int:
                raise CompileError("getitem takes one of several results; found something else.")
            return values[index]
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        results = result if isinstance(result, tuple | list) else (result,)
        for leaf in results:
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._require_inside(leaf)
            elif leaf is not None:
                raise CompileError(f"{node.target} returns {type(leaf).__name__}; not a tensor.")
        return result

    def _require_inside(self, value: Tensor) -> None:
        """Raises CompileError if a view reaches beyond its storage. Compiled code does not check
        it, and `as_strided` on fake tensors makes the storage larger."""
        size = value.untyped_storage().nbytes()
        if size > self.storage_bytes.setdefault(storage_key(value), size):
            raise CompileError("a view reaches beyond the memory of its tensor.")

    def _append(self, node: Node, value: Any) -> None:
        node.meta["val"] = value
        self.nodes.append(node)

    def _node(self, number: Any) -> Node:
        if type(number) is not int or not 0 <= number < len(self.nodes):
            raise CompileError(f"{number!r} is not the number of an earlier node.")
        return self.nodes[number]

    def _device(self, kind: Any) -> torch.device:
        if kind not in (self.device.type, *DEVICES):
            raise CompileError(f"{kind!r} is not a kind of device; expected {DEVICES}.")
        return self.device if kind == self.device.type else torch.device(kind)

    def _argument(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self._argument(value) for value in data]
        if isinstance(data, str):
            return _text(data)
        if data is None or isinstance(data, bool | int | float):
            return data
        ((tag, value),) = data.items()
        if tag == "node":
            return self._node(value)
        if tag == "graph":
            node = self.graph.get_attr(f"graph_{value}")
            node.meta["val"] = self.attributes[f"graph_{value}"]
            return node
        if tag in _NUMBERS:
            return _NUMBERS[tag](value)
        if tag == "tuple":
            return tuple(self._argument(inner) for inner in value)
        if tag == "device":
            return self._device(value)
        if tag in NAMED:
            return named(tag, value)
        raise CompileError(f"an argument has the tag {tag!r} with {value!r}; no such argument.")


def _inputs_to_data(graph: Graph) -> Data:
    """Returns the bytes of the storages behind the inputs, and the description of each input: kind
    of device, dtype, shape, strides, number of the storage, offset.

    Storages begin and end with their inputs: a batch may be a part of a larger one.
    """
    values = [value for node in graph.find_nodes(op="placeholder") for value in tensors_of(node)]
    ranges: dict[int, tuple[int, int]] = {}
    for value in values:
        key, (begin, end) = storage_key(value), byte_range(value)
        low, high = ranges.get(key, (begin, end))
        ranges[key] = min(low, begin), max(high, end)
    numbers = {key: number for number, key in enumerate(ranges)}
    inputs = []
    for value in values:
        shape, stride = list(map(int, value.shape)), list(map(int, value.stride()))
        key = storage_key(value)
        offset = (byte_range(value)[0] - ranges[key][0]) // value.itemsize
        dtype = str(value.dtype).removeprefix("torch.")
        inputs.append([value.device.type, dtype, shape, stride, numbers[key], offset])
    return {"storages": [high - low for low, high in ranges.values()], "inputs": inputs}


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CompileError(f"{value!r:.80} is not a size; expected a whole number.")
    return value


def _text(text: str) -> str:
    if not _TEXT.fullmatch(text):
        raise CompileError(
            f"an argument is the text {text!r}; expected only letters, digits, spaces and , . : > "
            "* + -, as in names of modes and in equations."
        )
    return text
