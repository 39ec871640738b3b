"""Printed graphs are Python: executed, they give the same bits; read, they say where each operation is from."""

import ast
import math
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from zbcompile.cli.target import load_example
from zbcompile.compiler.compile_example import CompiledExample, compile_example
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import is_getitem
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.print_python import WIDTH, print_piece
from zbcompile.schedules import build

TARGETS = Path(__file__).parents[3] / "examples" / "targets.py"


LARGE = [
    pytest.param("gpt", marks=pytest.mark.slow),
    pytest.param("llama", marks=[pytest.mark.slow, pytest.mark.beyond_sample]),
]


@pytest.fixture(scope="module", params=[*LARGE, "unet"])
def inspected(request: pytest.FixtureRequest) -> CompiledExample:
    torch.manual_seed(0)
    return compile_example(load_example(f"{TARGETS}:{request.param}"), build("zb-v", 1, 2), Choices())


@pytest.fixture(scope="module")
def exact() -> CompiledExample:
    torch.manual_seed(0)
    return compile_example(load_example(f"{TARGETS}:gpt"), build("1f1b", 2, 2), Choices(exact=True))


def _pieces(inspected: CompiledExample) -> Iterator[Piece]:
    """F of all stages, then B and W, then BW, from the last stage to the first."""
    stages = inspected.program.stages
    yield from (stage.pieces["F"] for stage in stages)
    for names in (("B", "W"), ("BW",)):
        yield from (stage.pieces[name] for stage in reversed(stages) for name in names)


def _run(module: Any, values: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results, and the inputs afterwards: W adds into some of them."""
    own = [value.clone() for value in values]
    torch.manual_seed(1)
    with torch.no_grad():
        return list(module(*own)), own


def _model_values(inspected: CompiledExample) -> dict[Slot, torch.Tensor]:
    example, values = inspected.example, {Slot("tangent", "loss"): torch.tensor(0.5)}
    inputs = {f"args[{i}]": value for i, value in enumerate(example.args)}
    inputs |= {f"kwargs[{name!r}]": value for name, value in example.kwargs.items()} | {"target": example.target}
    values |= {Slot("input", path): value for path, value in inputs.items()}
    values |= {Slot("constant", name): value for name, value in inspected.program.model.constants.items()}
    values |= {Slot("buffer", name): value for name, value in example.model.named_buffers()}
    for name, value in example.model.named_parameters():
        values |= {Slot("parameter", name): value.detach(), Slot("accumulator", name): torch.randn_like(value)}
    return values


def _check_same_bits(inspected: CompiledExample) -> None:
    values, saved = _model_values(inspected), {}
    for piece in _pieces(inspected):
        stage = piece.module.__class__.__name__[len(piece.name) :]
        found = [saved[stage, slot] if slot.kind == "saved" else values[slot] for slot in piece.inputs]
        namespace: dict[str, Any] = {}
        exec(print_piece(piece, "a graph"), namespace)
        expected, printed = _run(piece.module, found), _run(namespace["forward"], found)
        for left, right in zip([*expected[0], *expected[1]], [*printed[0], *printed[1]], strict=True):
            assert torch.equal(left, right)
            assert left.stride() == right.stride()
        for slot, value in zip(piece.outputs, expected[0], strict=True):
            saved[stage, slot] = value
            values[Slot("tangent", slot.name) if slot.kind == "input_gradient" else slot] = value


@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
def test_a_printed_graph_computes_the_same_bits(inspected: CompiledExample) -> None:
    _check_same_bits(inspected)


@pytest.mark.slow
def test_a_printed_graph_of_exact_mode_computes_the_same_bits(exact: CompiledExample) -> None:
    _check_same_bits(exact)


def test_every_operation_says_where_it_is_from(inspected: CompiledExample) -> None:
    for piece in _pieces(inspected):
        for node in piece.module.graph.nodes:
            if node.op == "call_function":
                origin = origin_of(node)
                assert (origin and str(origin)) or node.meta.get("pass"), f"{piece.name}: {node.name}"


def test_origins_are_lines_of_the_model(inspected: CompiledExample) -> None:
    origins = [origin_of(node) for piece in _pieces(inspected) for node in piece.module.graph.nodes]
    files = {Path(origin.file).name for origin in origins if origin}
    assert files <= {"gpt.py", "targets.py", "modeling_llama.py", "activations.py", ""}, files
    for origin in origins:
        if origin and origin.file:
            assert origin.code in Path(origin.file).read_text().splitlines()[origin.line - 1]


def test_every_statement_has_type_and_size(inspected: CompiledExample) -> None:
    for piece in _pieces(inspected):
        text = print_piece(piece, "a graph")
        operations = [n for n in piece.module.graph.nodes if n.op == "call_function"]
        described = sum("# " in line or ")  #" in line for line in text.splitlines() if "made by" not in line)
        assert described >= len(operations)
        assert sum(" B" in line or "iB" in line or "# (" in line for line in text.splitlines()) >= sum(
            not is_getitem(n) for n in operations
        )


def test_lines_fit_and_compile(inspected: CompiledExample) -> None:
    for piece in _pieces(inspected):
        text = print_piece(piece, "a graph")
        assert max(map(len, text.splitlines())) <= WIDTH
        (function,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        assert len(function.args.args) == len(piece.inputs)


def _printed(graph: Graph, root: dict[str, Any] | None = None) -> dict[str, Any]:
    holders = [Slot("input", n.name) for n in graph.find_nodes(op="placeholder")]
    (results,) = graph.output_node().args
    outputs = tuple(Slot("output", str(i)) for i in range(len(results)))  # type: ignore[arg-type]
    namespace: dict[str, Any] = {}
    exec(print_piece(Piece("F", GraphModule(root or {}, graph), tuple(holders), outputs), "a graph"), namespace)
    return namespace


ARGUMENTS = [
    float("inf"),
    float("-inf"),
    1e-300,
    complex(1, math.inf),
    (1,),
    [],
    {"a": [True, None]},
    slice(1, None, 2),
    torch.bfloat16,
    torch.device("cpu"),
    torch.channels_last,
    torch.strided,
    torch.Size((2, 3)),
    "a 'quoted' word",
]


@pytest.mark.parametrize("argument", ARGUMENTS, ids=repr)
def test_arguments_survive(argument: Any) -> None:
    graph = Graph()
    graph.output([graph.call_function(operator.is_not, (argument, None)), argument])
    assert _printed(graph)["forward"]()[1] == argument


def test_not_a_number_survives() -> None:
    graph = Graph()
    graph.output([float("nan")])
    assert math.isnan(_printed(graph)["forward"]()[0])


def test_functions_of_the_standard_library() -> None:
    graph = Graph()
    number = graph.call_function(operator.add, (graph.call_function(math.floor, (2.5,)), 1))
    graph.output([number])
    assert _printed(graph)["forward"]() == [3]


def test_tensors_held_by_the_graph_keep_their_bits() -> None:
    held = torch.tensor([0.1, float("nan"), -0.0, 1e-42])
    graph = Graph()
    graph.output([graph.get_attr("held")])
    (value,) = _printed(graph, {"held": held})["forward"]()
    assert torch.equal(value.view(torch.int32), held.view(torch.int32))


def test_branches_become_functions() -> None:
    branch = Graph()
    branch.output((branch.call_function(torch.ops.aten.neg.default, (branch.placeholder("x"),)),))
    module = GraphModule({}, branch)
    graph = Graph()
    x, flag = graph.placeholder("x"), graph.placeholder("flag")
    attributes = [graph.get_attr("negate"), graph.get_attr("negate")]
    chosen = graph.call_function(torch.ops.higher_order.cond, (flag, *attributes, (x,)))
    graph.output([graph.call_function(operator.getitem, (chosen, 0))])
    (value,) = _printed(graph, {"negate": module})["forward"](torch.ones(2), torch.tensor(True))
    assert value.tolist() == [-1.0, -1.0]


def test_what_has_no_notation_is_refused() -> None:
    graph = Graph()
    graph.output([graph.call_function(torch.add, (1, 2))])
    with pytest.raises(CompileError, match="cannot be written as Python"):
        _printed(graph)
    graph = Graph()
    graph.output([graph.call_function(operator.add, (range(3), 2))])
    with pytest.raises(CompileError, match="argument of type range"):
        _printed(graph)
