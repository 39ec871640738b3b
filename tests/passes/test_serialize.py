"""Pass graphs as JSON: the same graphs come back, and edited files are refused."""

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from gpt import GPT, next_byte_loss
from tests.support.pass_graph_runner import compile_step
from zbcompile.passes.compile_step import CompiledStep
from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import graph_text, tensors_of
from zbcompile.passes.operators import name_of_operator, operator_named
from zbcompile.passes.serialize import graph_from_data, graph_to_data
from zbcompile.passes.stage.accumulate import accumulate
from zbcompile.passes.step_graph import Label

CPU = torch.device("cpu")
TWICE = ["exported_serialize::twice"]


@torch.library.custom_op("exported_serialize::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(lambda x: torch.empty_like(x))
twice.register_autograd(lambda ctx, gradient: twice(gradient))


class Branching(nn.Module):
    """A branch, which is another graph, and an operator of another library."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = twice(self.layers[0](x))
        return self.layers[1](torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))


@cache
def compiled_gpt() -> CompiledStep:
    model, tokens = GPT(layers=1, width=32, length=16, dropout=0.1, tied=True), torch.ones(2, 16)
    batch = (tokens.long(),), {}, tokens.long(), next_byte_loss
    return compile_step(model, *batch, ranks_of=[0, 1], exact=True)


@cache
def compiled_branches() -> CompiledStep:
    batch = (torch.randn(2, 4),), {}, torch.randn(2, 4), nn.functional.mse_loss
    return compile_step(Branching(), *batch, ranks_of=[0, 1])


def specs(module: GraphModule) -> list[Any]:
    return [[(t.dtype, t.shape, t.stride()) for t in tensors_of(n)] for n in module.graph.nodes]


def written(module: GraphModule) -> Any:
    return json.loads(json.dumps(graph_to_data(module)))


def like(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return torch.randint(2, value.shape).to(value.dtype)
    whole = torch.randn(value.untyped_storage().nbytes() // value.element_size())
    return whole.as_strided(value.shape, value.stride())


@pytest.mark.parametrize("make", [compiled_gpt, compiled_branches])
def test_graphs_come_back_and_compute_the_same(make: Callable[[], CompiledStep]) -> None:
    compiled = make()
    buffers = {n: torch.zeros_like(p.meta["val"]) for n, p in compiled.step.parameters.items()}
    branches = 0
    for graph in (*compiled.passes.values(), *compiled.fused.values()):
        for module in (graph.module, accumulate(graph, buffers).module):
            data = written(module)
            read = graph_from_data(data, CPU, operators=TWICE)
            assert graph_text(read) == graph_text(module) or make is compiled_branches
            assert specs(read) == specs(module)
            assert written(read) == data
        branches += len(data["graphs"])
        if graph.kind != "F" or make is compiled_branches:  # dropout draws
            inputs = [like(node.meta["val"]) for node in graph.placeholders]
            read = graph_from_data(written(graph.module), CPU, operators=TWICE)
            with torch.no_grad():
                assert all(map(torch.equal, read(*inputs), graph.module(*inputs)))
    assert branches >= 2 or make is compiled_gpt


def test_operators_of_other_libraries_are_named_by_the_user() -> None:
    data = [written(graph.module) for graph in compiled_branches().passes.values()]
    calling = next(one for one in data if "exported_serialize" in json.dumps(one))
    with pytest.raises(CompileError, match=r'pass operators=\["exported_serialize::twice"\]'):
        graph_from_data(calling, CPU)


def edits() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yields hostile edits of a written forward: a title and a function that changes the data."""

    for name in (
        *("os.system", "builtins.eval.default", "aten.mm.default\n", "torch.load.default"),
        *("aten.from_file.default", "aten.set_.source_Tensor", "aten.resize_.default"),
        *("aten.item.default", "higher_order.wrap", "aten.__class__.default", "aten.mm.nothing"),
        *("c10d.send.default", "c10d.allreduce_.default", "prim.Print.default", "profiler._x.y"),
        *(None, 7, ["aten.mm.default"]),
    ):
        yield f"calls {name!r}", lambda d, name=name: d["nodes"][3].update(call=name)
    for title, value in {
        "a node reads a later one": {"node": 10**6},
        "a node reads itself by a negative number": {"node": -1},
        "a node by name": {"node": "self"},
        "an unknown tag": {"eval": "1"},
        "two tags": {"node": 0, "float": "nan"},
        "a float that is code": {"float": "__import__('os')"},
        "a string that ends a literal": '"); import os; ("',
        "an unknown dtype": {"dtype": "save"},
        "an unknown device": {"device": "meta:0"},
        "a graph that is not there": {"graph": 3},
    }.items():
        yield title, lambda d, v=value: d["nodes"][-1]["args"].__setitem__(0, v)
    for title, place, value in (
        ("an input of another shape", 2, [5]),
        ("a negative size", 2, [-1]),
        ("a stride beyond the storage", 3, [10**9, 1]),
        ("an offset beyond the storage", 5, 10**9),
        ("a storage that is not there", 4, 10**6),
        ("an input of an unknown dtype", 1, "save"),
        ("an input on an unknown device", 0, "disk"),
    ):
        yield title, lambda d, p=place, value=value: d["inputs"][0].__setitem__(p, value)
    beyond = {"call": "aten.as_strided.default", "args": [{"node": 0}, [8], [1], 10**6]}
    yield "an unknown keyword", lambda d: d["nodes"][-1].update(kwargs={"out": {"node": 0}})
    yield "keywords that are code", lambda d: d["nodes"][-1].update(kwargs={"x=1); f(": 0})
    yield "a view beyond its memory", lambda d: d["nodes"][-1].update(beyond)
    yield "an output that is not there", lambda d: d["outputs"].__setitem__(0, 10**6)
    yield "a branch that is not one", lambda d: d["graphs"].append({"nodes": []})
    yield "no nodes", lambda d: d.pop("nodes")
    yield "nodes that are text", lambda d: d.update(nodes="import os")
    yield "a size that is a boolean", lambda d: d["storages"].__setitem__(0, True)


EDITS = dict(edits())
# besides errors of their own: what data of another form raises, which a reader of files relabels
REFUSED = (CompileError, LookupError, TypeError, ValueError, AttributeError, RuntimeError)


def test_edited_files_are_refused() -> None:
    forward = written(compiled_gpt().passes[Label(0, "F")].module)
    for title, edit in EDITS.items():
        data = copy.deepcopy(forward)
        edit(data)
        assert data != forward, title
        try:
            graph_from_data(data, CPU)
        except REFUSED:
            continue
        pytest.fail(title)


@pytest.mark.parametrize("packet", ["aten._assert_async", "aten.relu", "exported_serialize.twice"])
def test_of_a_packet_only_its_overloads_are_found(packet: str) -> None:
    """No method or attribute of what `torch.ops` holds is reached."""
    library, _, function = packet.partition(".")
    actual = getattr(getattr(torch.ops, library), function)
    inner = {"__globals__", "__getattr__", "__builtins__", "__wrapped__", "op", "_op"}
    for attribute in inner.union(
        dir(actual), dir(type(actual)), dir(actual.op), actual.overloads()
    ):
        try:
            target = operator_named(f"{packet}.{attribute}", set(TWICE))
        except CompileError:
            continue
        assert attribute in actual.overloads()
        assert name_of_operator(target) == f"{packet}.{attribute}"
