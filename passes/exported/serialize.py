"""Pass graphs as JSON: a graph that is read runs no code that is not torch's or this library's.

Inputs are described by dtype, shape, strides and storage. Everything else is inferred when a graph
is read, by one run on fake tensors. Operations are named, and only operators of a closed list may
be called; further ones are allowed by name (`operators=`). Nodes have numbers, so no name of the
file reaches generated code.

>>> data = pass_to_data(compiled.passes[Label(0, "F")])            # doctest: +SKIP
>>> pass_from_data(json.loads(json.dumps(data)), torch.device("cpu"))  # doctest: +SKIP
"""

import math
import operator
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from zbcompile.passes.errors import CompileError
from zbcompile.passes.exported.capture.source_lines import LINE
from zbcompile.passes.exported.operators import name_of_operator, operator_named
from zbcompile.passes.exported.recompute.recompute import RECOMPUTED
from zbcompile.passes.exported.stage.pass_graph import KINDS, ROLES, PassGraph, Slot
from zbcompile.passes.exported.step_graph import tensors_of
from zbcompile.passes.exported.torch_private import (
    ANNOTATIONS,
    FakeTensorMode,
    LazyGraphModule,
    OpOverload,
    annotations_of,
    schema_of,
    storage_key,
)
from zbcompile.passes.exported.torch_private_export import kernel_strides
from zbcompile.passes.torch_names import NAMED, dtype_named, name_in_torch, named

Data = dict[str, Any]
# Graph compilers copy strings into generated source: none may end a literal.
_TEXT = re.compile(r"[\w ,.:>*+-]*", re.ASCII)
_DEVICES = ("cpu", "cuda")
# What data of another form raises.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


def pass_to_data(graph: PassGraph) -> Data:
    """Returns a pass graph as JSON values.

    Raises:
        CompileError: An operation or an argument has no such form.
    """
    numbers: dict[Node, int] = {}
    nodes = []
    for node in graph.module.graph.nodes:
        if node.op == "get_attr":
            raise CompileError(f"the graph refers to {node.target}: torch.cond cannot be saved.")
        if node.op == "call_function":
            nodes.append(_node_to_data(node, numbers))
        if node.op != "output":
            numbers[node] = len(numbers)
    storages, inputs = _inputs_to_data(graph)
    return {
        "stage": graph.stage,
        "kind": graph.kind,
        "storages": storages,
        "inputs": inputs,
        "nodes": nodes,
        "outputs": [
            {
                "slot": list(slot),
                "node": numbers[node],
                "readers": sorted(graph.readers.get(slot, ())),
            }
            for slot, node in zip(graph.outputs, graph.results, strict=True)
        ],
    }


def pass_from_data(data: Data, device: torch.device, operators: Collection[str] = ()) -> PassGraph:
    """Returns the pass graph that `pass_to_data` wrote.

    Args:
        device: The device of this process.
        operators: Operators of other libraries that the graph may call, as `library::operator`.

    Raises:
        CompileError: The graph is not one that this library writes.
    """
    try:
        return _Reader(device, operators).read(data)
    except CompileError:
        raise
    except _MALFORMED as error:
        raise CompileError(
            f"a saved graph does not have the form that this library writes: {error!r}"
        ) from None


class _Reader:
    """Builds a graph and runs it on fake tensors."""

    def __init__(self, device: torch.device, operators: Collection[str]) -> None:
        self.device, self.operators = device, operators
        self.mode = FakeTensorMode(allow_fallback_kernels=False)
        self.graph = Graph()
        self.nodes: list[Node] = []
        self.storage_bytes: dict[int, int] = {}

    def read(self, data: Data) -> PassGraph:
        if type(data["stage"]) is not int or data["kind"] not in KINDS:
            raise CompileError(f"{data['stage']!r}.{data['kind']!r} is not a pass.")
        with self.mode, torch.no_grad(), kernel_strides():
            inputs = self._read_inputs(data)
            for node in data["nodes"]:
                self._read_node(node)
        outputs, readers = [], {}
        results = []
        for output in data["outputs"]:
            slot = _slot(output["slot"])
            results.append(self._node(output["node"]))
            if not isinstance(results[-1].meta["val"], Tensor):
                raise CompileError(f"{slot} is not a tensor.")
            if not set(output["readers"]) <= set(KINDS):
                raise CompileError(f"{slot} is read by {output['readers']}: no such passes.")
            outputs.append(slot)
            if output["readers"]:
                readers[slot] = frozenset(output["readers"])
        for slots in (inputs, outputs):
            if len(set(slots)) < len(slots):
                raise CompileError("two inputs or outputs of a graph have one role and name.")
        self.graph.output(tuple(results))
        self.graph.lint()
        module = LazyGraphModule({}, self.graph, class_name="Pass")
        kind, stage = data["kind"], data["stage"]
        return PassGraph(stage, kind, module, tuple(inputs), tuple(outputs), readers)

    def _read_inputs(self, data: Data) -> list[Slot]:
        sizes: Sequence[int] = data["storages"]
        storages: dict[int, Tensor] = {}
        slots = []
        for description in data["inputs"]:
            slots.append(_slot(description["slot"]))
            number = description["storage"]
            if number not in storages:
                storages[number] = torch.empty(
                    _size(sizes[number]), dtype=torch.uint8, device=self._device(description)
                )
            dtype = dtype_named(description["dtype"])
            shape = list(map(_size, description["shape"]))
            stride = list(map(_size, description["stride"]))
            offset = _size(description["offset"])
            count = storages[number].numel() // dtype.itemsize * dtype.itemsize
            whole = storages[number][:count].view(dtype)
            self._require_inside(whole)
            value = torch.as_strided(whole, shape, stride, offset)
            self._require_inside(value)
            self._append(self.graph.placeholder(f"input_{len(slots) - 1}"), value)
        return slots

    def _read_node(self, data: Data) -> None:
        target = operator_named(data["call"], self.operators)
        args = tuple(self._argument(value) for value in data["args"])
        kwargs = {str(name): self._argument(v) for name, v in data.get("kwargs", {}).items()}
        if isinstance(target, OpOverload):
            known = {argument.name for argument in schema_of(target).arguments}
            if not kwargs.keys() <= known:
                raise CompileError(f"{target} has no arguments {sorted(kwargs.keys() - known)}.")
        node = self.graph.call_function(target, args, kwargs)
        self._append(node, self._run(node))
        custom = {LINE: str(data["line"])} if "line" in data else {}
        node.meta[ANNOTATIONS] = custom
        if data.get("recomputed"):
            node.meta[RECOMPUTED] = True

    def _run(self, node: Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        if node.target is operator.getitem:
            values, index = args
            if not isinstance(values, tuple | list) or type(index) is not int:
                raise CompileError("getitem takes one of several results; found something else.")
            return values[index]
        try:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            first = str(error).partition("\n")[0]
            raise CompileError(f"{node.target} cannot run on its arguments: {first}") from None
        leaves = result if isinstance(result, tuple | list) else (result,)
        for leaf in leaves:
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

    def _device(self, data: Data) -> torch.device:
        kind = data["device"]
        if kind not in (self.device.type, *_DEVICES):
            raise CompileError(f"{kind!r} is not a kind of device; expected {_DEVICES}.")
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
        if tag == "tuple":
            return tuple(self._argument(inner) for inner in value)
        if tag == "float" and value in ("inf", "-inf", "nan"):
            return float(value)
        if tag == "device":
            return self._device(data)
        if tag in NAMED:
            return named(tag, value)
        raise CompileError(f"an argument has the tag {tag!r} with {value!r}; no such argument.")


def _inputs_to_data(graph: PassGraph) -> tuple[list[int], list[Data]]:
    """Returns the bytes of the storages behind the inputs, and the description of each input."""
    numbers: dict[int, int] = {}
    sizes: list[int] = []
    inputs = []
    for slot, node in zip(graph.inputs, graph.placeholders, strict=True):
        (value,) = tensors_of(node)
        key = storage_key(value)
        if key not in numbers:
            numbers[key] = len(sizes)
            sizes.append(int(value.untyped_storage().nbytes()))
        inputs.append(
            {
                "slot": list(slot),
                "dtype": str(value.dtype).removeprefix("torch."),
                "device": value.device.type,
                "shape": list(value.shape),
                "stride": list(value.stride()),
                "offset": int(value.storage_offset()),
                "storage": numbers[key],
            }
        )
    return sizes, inputs


def _node_to_data(node: Node, numbers: Mapping[Node, int]) -> Data:
    data: Data = {"call": name_of_operator(node.target)}
    data["args"] = [_argument_to_data(value, numbers) for value in node.args]
    if node.kwargs:
        data["kwargs"] = {
            name: _argument_to_data(value, numbers) for name, value in node.kwargs.items()
        }
    line = annotations_of(node).get(LINE)
    if line:
        data["line"] = os.path.basename(line)  # without the folders of this machine
    if node.meta.get(RECOMPUTED):
        data["recomputed"] = True
    return data


def _argument_to_data(value: Any, numbers: Mapping[Node, int]) -> Any:
    if isinstance(value, Node):
        return {"node": numbers[value]}
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list):
        return [_argument_to_data(inner, numbers) for inner in value]
    if isinstance(value, tuple):
        return {"tuple": [_argument_to_data(inner, numbers) for inner in value]}
    if isinstance(value, torch.device):
        return {"device": value.type}
    found = name_in_torch(value)
    if found is None:
        raise CompileError(f"an argument of type {type(value).__name__} cannot be saved.")
    return dict([found])


def _slot(data: Any) -> Slot:
    role, name = data
    if role not in ROLES or not isinstance(name, str):
        raise CompileError(f"{data!r} is not a role and a name.")
    return Slot(role, name)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CompileError(f"{value!r} is not a size; expected a whole number.")
    return value


def _text(text: str) -> str:
    if not _TEXT.fullmatch(text):
        raise CompileError(
            f"an argument is the text {text!r}; expected only letters, digits, spaces and , . : > "
            "* + -, as in names of modes and in equations."
        )
    return text
