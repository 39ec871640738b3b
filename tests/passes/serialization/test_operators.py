"""Names that a graph may have of operations: no name reaches anything else."""

import operator
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zbcompile.passes.errors import CompileError
from zbcompile.passes.serialization.graph_modules import GraphReading, piece_from_data
from zbcompile.passes.serialization.operators import HIGHER_ORDER, SILENT, name_of_operator, operator_named
from zbcompile.passes.torch_private import OpOverload

FOREIGN = "zbtests.doubled"


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    """An operator of another library with a kernel in Python."""
    with torch.library._scoped_library("zbtests", "DEF") as made:
        made.define("doubled(Tensor x) -> Tensor")
        made.impl("doubled", lambda x: 2 * x, "CompositeExplicitAutograd")
        yield


def attributes_of(packet: str) -> list[str]:
    """Everything that `torch.ops` answers to behind a name, and what is reached through that."""
    library, _, function = packet.partition(".")
    found = getattr(getattr(torch.ops, library), function)
    inner = ["__globals__", "__getattr__", "__builtins__", "__wrapped__", "op", "_op"]
    return sorted({*dir(found), *dir(type(found)), *dir(found.op), *inner})


@pytest.mark.parametrize("packet", [*SILENT, FOREIGN])
def test_of_a_packet_only_its_overloads_are_found(packet: str) -> None:
    """Also of the operators that return nothing, and of those of a library that is trusted."""
    foreign, overloads = {FOREIGN.replace(".", "::")}, operator_overloads(packet)
    found = set()
    for attribute in (*attributes_of(packet), *overloads):
        try:
            target = operator_named(f"{packet}.{attribute}", foreign)
        except CompileError:
            continue
        assert type(target) is OpOverload
        assert name_of_operator(target) == f"{packet}.{attribute}"
        found.add(attribute)
    assert found == set(overloads)
    assert {name for name in overloads if name.startswith("_")} == set()


def operator_overloads(packet: str) -> list[str]:
    library, _, function = packet.partition(".")
    return list(getattr(getattr(torch.ops, library), function).overloads())


NOTHING: list[Any] = [
    "aten.append.t",
    "aten.list.t",
    "aten.name.default",
    "aten.__class__.default",
    "getitem.x",
    3,
    None,
]
NOTHING += ["zbtests.__dict__.default", "zbtests.doubled", "higher_order.wrap", "higher_order.cond.__call__"]
NOTHING += ["aten.relu.default\n", "aten.\uff52elu.default", "aten.from_file.default", "zbcompile.undefined.default"]
NOTHING += ["_c10d_functional.isend.default"]


@pytest.mark.parametrize("name", NOTHING)
def test_what_is_no_operator_of_the_dispatcher(name: Any) -> None:
    with pytest.raises(CompileError, match="operator"):
        operator_named(name, {"zbtests::__dict__", "zbtests::doubled"})


def test_names_that_begin_with_an_underscore_are_operators_too() -> None:
    for name in ("aten._softmax.default", "aten.__and__.Tensor", f"{FOREIGN}.default"):
        assert name_of_operator(operator_named(name, {"zbtests::doubled"})) == name
    assert operator_named("getitem") is operator.getitem
    assert [operator_named(name) for name in HIGHER_ORDER] == list(HIGHER_ORDER.values())


def hostile_node(chance: random.Random, names: list[str]) -> dict[str, Any]:
    """A call of anything with anything."""
    texts = ["exec", "__globals__", "open(__file__)", "nan", "a\nb", "__import__('os')", "self", "\ud800"]
    odd = [None, -1, 10**30, 1e300, [], {}, {"node": "x"}, {"node": "made"}, {"dtype": "load"}, {"float": "1_0"}]
    odd += [{"tuple": 1}, {"slice": []}, {"complex": [1]}, {"device": "disk"}, {"a": 1, "b": 2}, [[[{"node": "x"}]]]]
    values = [*texts, *odd]
    return {
        "op": chance.choice(["call_function"] * 8 + ["get_attr", "placeholder", "output", "call_method"]),
        "name": chance.choice(["made", "made", *texts]),
        "target": chance.choice([*names, *texts]),
        "args": [chance.choice(values) for _ in range(chance.randrange(4))],
        "kwargs": {chance.choice(texts): chance.choice(values) for _ in range(chance.randrange(2))},
        "value": chance.choice([None, ["float32", "cpu", [4], [1], 0, 0], ["save", "cpu", [2**62], [1], -1, -1], 7]),
    }


@pytest.mark.slow
def test_thousands_of_hostile_operations() -> None:
    """Each is refused with a line, or makes tensors and numbers of what it is given."""
    chance, packets = random.Random(0), (*SILENT, FOREIGN, "aten.relu", "aten.unbind", "aten.item")
    names = [f"{packet}.{attribute}" for packet in packets for attribute in attributes_of(packet)]
    names += ["getitem"] * 200 + ["aten.relu.default", "aten.unbind.int", "aten.add.Tensor", f"{FOREIGN}.default"] * 100
    taken = {"op": "placeholder", "name": "x", "target": "x", "value": ["float32", "cpu", [4], [1], 0, 0]}
    result = {"op": "output", "name": "output", "args": [{"tuple": [{"node": "x"}]}]}
    reading, read = GraphReading(torch.device("cpu"), {}, {"zbtests::doubled"}), 0
    for _ in range(4000):
        nodes = [taken, *(hostile_node(chance, names) for _ in range(chance.choice((1, 1, 2)))), result]
        slots = {"inputs": [["input", "x"]], "outputs": [["output", "0"]]}
        try:
            piece = piece_from_data("F", {**slots, "storages": [16], "nodes": nodes, "graphs": {}}, reading, "", "F")
        except (CompileError, KeyError, TypeError, ValueError, IndexError, RuntimeError, OverflowError):
            continue  # of these the reader of a directory makes one line
        read += 1
        calls = [node.target for node in piece.module.graph.nodes if node.op == "call_function"]
        assert all(target is operator.getitem or type(target) is OpOverload for target in calls)
    assert 0 < read < 800


def read_with(*nodes: dict[str, Any]) -> Any:
    """The piece of one input, a vector of four, with these operations."""
    taken = {"op": "placeholder", "name": "x", "target": "x", "value": ["float32", "cpu", [4], [1], 0, 0]}
    result = {"op": "output", "name": "output", "args": [[{"node": "x"}]]}
    calls = [{"op": "call_function", "name": f"made_{number}", **node} for number, node in enumerate(nodes)]
    slots = {"inputs": [["input", "x"]], "outputs": [["output", "0"]]}
    data = {**slots, "storages": [2**30, 4, 64], "nodes": [taken, *calls, result], "graphs": {}}
    return piece_from_data("F", data, GraphReading(torch.device("cpu"), {}), "", "F")


def expanded(*shape: int) -> list[dict[str, Any]]:
    """Two operations: a scalar, and a tensor of this shape whose elements all are in its place."""
    scalar = {"target": "aten.select.int", "args": [{"node": "x"}, 0, 0], "value": ["float32", "cpu", [], [], 0, 0]}
    value = ["float32", "cpu", list(shape), [0] * len(shape), 0, 0]
    return [scalar, {"target": "aten.expand.default", "args": [{"node": "made_0"}, list(shape)], "value": value}]


LAST = {"node": "made_1"}


def test_no_kernel_runs_while_a_graph_is_read() -> None:
    """geqrf has no shape function, for which torch would factorise 400 million zeros; it makes what is written."""
    values = [["float32", "cpu", [20000, 20000], [1, 20000], 2, 0], ["float32", "cpu", [20000], [1], 2, 0]]
    piece = read_with(
        *expanded(20000, 20000), {"target": "aten.geqrf.default", "args": [LAST], "value": {"values": values}}
    )
    assert [tuple(each.shape) for each in list(piece.module.graph.nodes)[3].meta["val"]] == [(20000, 20000), (20000,)]


@pytest.mark.parametrize(("source", "offset"), [("x", 10**6), ("made_0", 10**6), ("x", 1)])
def test_no_view_reaches_out_of_its_tensor(source: str, offset: int) -> None:
    """Compiled code would read there, and the bytes of an input's storage are only said."""
    own = {"target": "aten.relu.default", "args": [{"node": "x"}], "value": ["float32", "cpu", [4], [1], 2, 0]}
    view = {"target": "aten.as_strided.default", "args": [{"node": source}, [4], [1], offset]}
    with pytest.raises(CompileError, match="reaches out of"):
        read_with(own, {**view, "value": ["float32", "cpu", [4], [1], 0, offset]})
