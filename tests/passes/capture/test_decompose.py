"""Operations decomposed once for all that are equal: the graph is the one that torch makes of all of them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from zbcompile.passes.capture import export
from zbcompile.passes.capture.decompose import decomposed


class Layer(nn.Module):
    """A view of several results, casts that change nothing, a part under no_grad, random numbers, attention, an empty
    tensor made for this call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.recurrent = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            scale, shift = x.std(-1, keepdim=True), x.mean(-1, keepdim=True).to(x.dtype)
        q, k, v = self.wide(self.norm(x).float()).chunk(3, -1)
        cache = torch.cat([torch.tensor([], dtype=x.dtype).reshape(*k.shape[:-2], 0, k.shape[-1]), k], -2)
        found = nn.functional.scaled_dot_product_attention(q, cache.contiguous(), v, mask)
        top, _ = nn.functional.dropout(found, 0.1).max(-1, keepdim=True)
        return self.recurrent((x - shift) / scale + found.reshape(x.shape) * top)[0]


class Model(nn.Module):
    def __init__(self, layers: int, writes: bool = False) -> None:
        super().__init__()
        self.layers, self.writes = nn.ModuleList(Layer(8) for _ in range(layers)), writes

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        for layer in self.layers:
            x = layer(x, mask) + layer(x)
        return x.add_(1) if self.writes else x


def _operations(graph: Graph) -> list[Any]:
    nodes: list[Node] = [node for node in graph.nodes if node.op != "placeholder"]
    called = [(n.op, n.name, str(n.target), repr(n.args), repr(n.kwargs)) for n in nodes]
    return [*zip(called, map(_origin, nodes), strict=True)]


def _origin(node: Node) -> list[Any]:
    """Where a node comes from, and the notes on it that torch has not made for itself."""
    notes = {k: v for k, v in (node.meta.get("custom") or {}).items() if not k.startswith("_torchdynamo")}
    return [*map(node.meta.get, ("stack_trace", "nn_module_stack", "source_fn_stack")), notes]


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Graph]]:
    """The graphs that torch decomposes as they are, beside the comparison."""
    torchs, found = ExportedProgram.run_decompositions, list[Graph]()

    def run(program: ExportedProgram, table: Any = None) -> ExportedProgram:
        found.append(program.graph)
        return torchs(program, table)

    def both(program: ExportedProgram) -> ExportedProgram:
        expected = _operations(torchs(program, {}).graph)
        own = decomposed(program)
        assert _operations(own.graph) == expected
        return own

    monkeypatch.setattr(ExportedProgram, "run_decompositions", run)
    monkeypatch.setattr(export, "decomposed", both)
    return found


def test_it_is_the_graph_that_torch_makes(whole: list[Graph]) -> None:
    """By names, arguments, lines of the model and notes; and twice as many layers need no more operations."""
    for layers in (2, 4):
        export.capture(Model(layers), (torch.randn(2, 4, 8),), {}, torch.randn(2, 4, 8), nn.functional.mse_loss)
    few, many = (sum(node.op == "call_function" for node in graph.nodes) for graph in whole)
    assert many - few == 4 * 3  # more regions, with two results each: every region is decomposed by itself


def test_what_writes_in_place_is_decomposed_whole(whole: list[Graph]) -> None:
    export.capture(Model(2, writes=True), (torch.randn(2, 4, 8),), {}, torch.randn(2, 4, 8), nn.functional.mse_loss)
    assert "aten.add_.Tensor" in {str(node.target) for node in whole[-1].nodes}
