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
from tests.support.zoo import ZOO
from zbcompile.passes.compile_step import CompiledStep
from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import graph_text, tensors_of
from zbcompile.passes.operators import HIGHER_ORDER, name_of_operator, operator_named
from zbcompile.passes.serialize import graph_from_data, graph_to_data
from zbcompile.passes.stage.accumulate import accumulate
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.step_graph import Label

CPU = torch.device("cpu")
TOKENS = torch.arange(32).view(2, 16)


def compiled_zoo(name: str) -> tuple[CompiledStep, nn.Module]:
    problem = ZOO[name]
    part = next(iter(problem.batches(1, 8)[0].parts(4)))
    batch = part.args, dict(part.kwargs), part.target
    model = problem.model().train()
    return compile_step(model, *batch, problem.loss, ranks_of=[0, 1], recompute="selective"), model


@cache
def compiled_gpt() -> tuple[CompiledStep, nn.Module]:
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, length=16, dropout=0.1, tied=True)
    return compile_step(
        model, (TOKENS,), {}, TOKENS, next_byte_loss, ranks_of=[0, 1], exact=True
    ), model


def specs(module: GraphModule) -> list[Any]:
    return [
        [(t.dtype, tuple(t.shape), t.stride()) for t in tensors_of(node)]
        for node in module.graph.nodes
    ]


def assert_round_trip(graph: PassGraph) -> None:
    written = json.dumps(graph_to_data(graph.module))
    read = graph_from_data(json.loads(written), CPU)
    assert graph_text(read) == graph_text(graph.module)
    assert specs(read) == specs(graph.module)
    assert json.dumps(graph_to_data(read)) == written


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        compiled_gpt,
        *(
            pytest.param(lambda name=name: compiled_zoo(name), id=name, marks=marks)
            for name, marks in (
                ("unet", ()),
                ("llama-unpadded", pytest.mark.beyond_sample),
                ("t5", pytest.mark.beyond_sample),
            )
        ),
    ],
)
def test_graphs_come_back(make: Callable[[], tuple[CompiledStep, nn.Module]]) -> None:
    compiled, _ = make()
    buffers = {n: torch.zeros_like(p.meta["val"]) for n, p in compiled.step.parameters.items()}
    for graph in (*compiled.passes.values(), *compiled.fused.values()):
        assert_round_trip(graph)
        assert_round_trip(accumulate(graph, buffers))


def test_a_graph_that_was_read_computes_the_same() -> None:
    compiled, _ = compiled_gpt()
    graph = compiled.passes[Label(1, "B")]
    read = graph_from_data(json.loads(json.dumps(graph_to_data(graph.module))), CPU)
    inputs = [like(node.meta["val"]) for node in graph.placeholders]
    with torch.no_grad():
        assert all(map(torch.equal, read(*inputs), graph.module(*inputs)))


def like(value: Tensor) -> Tensor:
    if value.is_floating_point():
        whole = torch.randn(value.untyped_storage().nbytes() // value.element_size())
        return whole.as_strided(value.shape, value.stride())
    return torch.randint(2, value.shape).to(value.dtype)


@torch.library.custom_op("exported_serialize::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(lambda x: torch.empty_like(x))
twice.register_autograd(lambda ctx, gradient: twice(gradient))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](twice(self.layers[0](x)))


def test_operators_of_other_libraries_are_named_by_the_user() -> None:
    batch = (torch.randn(2, 4),), {}, torch.randn(2, 4)
    compiled = compile_step(Custom(), *batch, nn.functional.mse_loss, ranks_of=[0, 1])
    data = [
        json.loads(json.dumps(graph_to_data(graph.module))) for graph in compiled.passes.values()
    ]
    calling = next(one for one in data if "exported_serialize" in json.dumps(one))
    with pytest.raises(CompileError, match=r'pass operators=\["exported_serialize::twice"\]'):
        graph_from_data(calling, CPU)
    for one in data:
        assert graph_from_data(one, CPU, operators=["exported_serialize::twice"]).graph.nodes


def first(data: Any, name: str) -> Any:
    """Returns the first node that calls an operator of this name."""
    return next(node for node in data["nodes"] if node["call"].split(".")[-2:-1] == [name])


def edits() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yields hostile edits of a written forward: a title and a function that changes the data."""

    def call(name: Any) -> Callable[[Any], Any]:
        return lambda d: d["nodes"][3].update(call=name)

    def argument(value: Any, position: int = 0) -> Callable[[Any], Any]:
        return lambda d: d["nodes"][-1]["args"].__setitem__(position, value)

    def entry(position: int, value: Any) -> Callable[[Any], Any]:
        return lambda d: d["inputs"][0].__setitem__(position, value)

    for name in (
        *("os.system", "builtins.eval.default", "aten.mm.default\n", "torch.load.default"),
        *("aten.from_file.default", "aten.set_.source_Tensor", "aten.resize_.default"),
        *("aten.item.default", "higher_order.wrap", "aten.__class__.default", "aten.mm.nothing"),
        *("c10d.send.default", "c10d.allreduce_.default", "prim.Print.default", "profiler._x.y"),
        *(None, 7, ["aten.mm.default"]),
    ):
        yield f"calls {name!r}", call(name)
    yield "a node reads a later one", argument({"node": 10**6})
    yield "a node reads itself by a negative number", argument({"node": -1})
    yield "a node by name", argument({"node": "self"})
    yield "an unknown tag", argument({"eval": "1"})
    yield "two tags", argument({"node": 0, "float": "nan"})
    yield "a float that is code", argument({"float": "__import__('os')"})
    yield "a string that ends a literal", argument('"); import os; ("')
    yield "an unknown dtype", argument({"dtype": "save"})
    yield "an unknown device", argument({"device": "meta:0"})
    yield "an unknown keyword", lambda d: d["nodes"][-1].update(kwargs={"out": {"node": 0}})
    yield "keywords that are code", lambda d: d["nodes"][-1].update(kwargs={"x=1); f(": 0})
    yield "a shape of other arguments", lambda d: first(d, "view")["args"].__setitem__(1, [3, 3, 3])
    yield "an input of another shape", entry(2, [5])
    yield "a negative size", entry(2, [-1])
    yield "a stride beyond the storage", entry(3, [10**9, 1])
    yield "an offset beyond the storage", entry(5, 10**9)
    yield "a storage that is not there", entry(4, 10**6)
    yield "an input of an unknown dtype", entry(1, "save")
    yield "an input on an unknown device", entry(0, "disk")
    yield "an output that is not there", lambda d: d["outputs"].__setitem__(0, 10**6)
    yield "a graph that is not there", argument({"graph": 3})
    yield "a branch that is not one", lambda d: d["graphs"].append({"nodes": []})
    yield "no nodes", lambda d: d.pop("nodes")
    yield "nodes that are text", lambda d: d.update(nodes="import os")
    yield (
        "a view beyond its memory",
        lambda d: d["nodes"][-1].update(
            call="aten.as_strided.default", args=[{"node": 0}, [8], [1], 10**6]
        ),
    )
    yield "a size that is a boolean", lambda d: d["storages"].__setitem__(0, True)


EDITS = dict(edits())
# besides errors of their own: what data of another form raises, which a reader of files relabels
REFUSED = (CompileError, LookupError, TypeError, ValueError, AttributeError, RuntimeError)


def test_there_are_many_edits() -> None:
    assert len(EDITS) >= 30


@pytest.mark.parametrize("title", EDITS)
def test_edited_files_are_refused(title: str) -> None:
    compiled, _ = compiled_gpt()
    data = copy.deepcopy(written_forward())
    EDITS[title](data)
    assert data != written_forward()
    with pytest.raises(REFUSED):
        graph_from_data(data, CPU)
    assert compiled


@cache
def written_forward() -> Any:
    return json.loads(json.dumps(graph_to_data(compiled_gpt()[0].passes[Label(0, "F")].module)))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))


def test_branches_are_graphs_of_their_own() -> None:
    batch = (torch.randn(2, 4),), {}, torch.randn(2, 4)
    compiled = compile_step(Branching(), *batch, nn.functional.mse_loss, ranks_of=[0, 1])
    branches = 0
    for graph in compiled.passes.values():
        data = json.loads(json.dumps(graph_to_data(graph.module)))
        branches += len(data["graphs"])
        read = graph_from_data(data, CPU)
        assert specs(read) == specs(graph.module)
        inputs = [like(node.meta["val"]) for node in graph.placeholders]
        with torch.no_grad():
            assert all(map(torch.equal, read(*inputs), graph.module(*inputs)))
    assert branches >= 2


PACKETS = ("aten._assert_async", "aten.relu", "exported_serialize.twice")


@pytest.mark.parametrize("packet", PACKETS)
def test_of_a_packet_only_its_overloads_are_found(packet: str) -> None:
    """No method or attribute of what `torch.ops` holds is reached."""
    library, _, function = packet.partition(".")
    actual = getattr(getattr(torch.ops, library), function)
    inner = ["__globals__", "__getattr__", "__builtins__", "__wrapped__", "op", "_op"]
    for attribute in {
        *dir(actual),
        *dir(type(actual)),
        *dir(actual.op),
        *inner,
        *actual.overloads(),
    }:
        name = f"{packet}.{attribute}"
        try:
            target = operator_named(name, {"exported_serialize::twice"})
        except CompileError:
            continue
        assert attribute in actual.overloads()
        assert name_of_operator(target) == name


def test_higher_order_operators_are_a_closed_list() -> None:
    assert [name_of_operator(operator_named(name)) for name in HIGHER_ORDER] == list(HIGHER_ORDER)
