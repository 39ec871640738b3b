"""FLOPs, bytes and seconds of operations in a graph; FLOPs are compared with torch's counter."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from tests.support.training import ROWS, Case, pipeline_of, problem_of
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.cost.node_cost import (
    graph_seconds,
    node_bytes,
    node_flops,
    node_seconds,
    operators_without_formula,
)
from zbcompile.passes.graph.fx import like
from zbcompile.passes.torch_private import FakeTensorMode, make_fx

aten = torch.ops.aten
MACHINE = Hardware(
    "round figures",
    peak={"float32": 1e9, "bfloat16": 4e9},
    bandwidth=1e6,
    launch=1.0,
    product_efficiency=0.5,
    bandwidth_efficiency=0.1,
)


def traced(function: Callable[..., Any], *tensors: Tensor) -> GraphModule:
    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors]
        return make_fx(function)(*fakes)


def calls(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt-tied", "unet"])
def test_as_torchs_counter(model: str) -> None:
    case = Case(model, "zb-h1", 2, 2)
    batch = problem_of(model).batches(1, case.microbatches * ROWS)[0]
    target = {} if batch.target is None else {"target": batch.target}
    pipe = pipeline_of(case).compile(*batch.args, **batch.kwargs, **target)
    for stage in pipe.program.stages:
        for piece in stage.pieces.values():
            nodes = [n for n in calls(piece.module) if "for_cpu" not in str(n.target)]
            for node in nodes:
                assert node_flops(node) == counted_by_torch(node), node


def counted_by_torch(node: Node) -> int:
    def example(source: Node) -> Any:
        value = source.meta["val"]
        return like(value) if isinstance(value, Tensor) else value

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), example)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad(), FlopCounterMode(display=False) as counter:
        node.target(*args, **kwargs)  # type: ignore[operator]
    return counter.get_total_flops()


def experts(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weights, offs=ends)


def weight_of_experts(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows.t(), gradient, offs=ends)


def in_turn(*arguments: Tensor) -> Tensor:
    """transformers' experts where there is no kernel for them, with their backward."""
    rows, weights, ends = arguments
    made = torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)
    return torch.ops.transformers.grouped_mm_fallback_backward(rows, weights, ends, made)[0]


ENDS = torch.tensor([3, 3, 10], dtype=torch.int32)
HALF = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("function", "tensors", "products"),
    [
        (torch.mv, (torch.ones(3, 4), torch.ones(4)), 12),
        (torch.dot, (torch.ones(5), torch.ones(5)), 5),
        (torch.addmv, (torch.ones(3), torch.ones(3, 4), torch.ones(4)), 12),
        (torch.addbmm, (torch.ones(3, 2), torch.ones(5, 3, 4), torch.ones(5, 4, 2)), 120),
        (experts, (torch.ones(10, 16, **HALF), torch.ones(3, 16, 8, **HALF), ENDS), 1280),
        (weight_of_experts, (torch.ones(10, 16, **HALF), torch.ones(10, 8, **HALF), ENDS), 1280),
        (in_turn, (torch.ones(10, 16), torch.ones(3, 16, 8), ENDS), 3 * 1280),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_products_that_torch_does_not_count(
    function: Callable[..., Tensor], tensors: tuple[Tensor, ...], products: int
) -> None:
    importlib.import_module("transformers.integrations.moe")
    assert sum(map(node_flops, calls(traced(function, *tensors)))) == 2 * products


BUFFER, LEFT, RIGHT = 4 * 8 * 6, 4 * 8 * 5, 4 * 5 * 6  # bytes


@pytest.mark.parametrize(
    ("operation", "moved"),
    [
        (lambda buffer, left, right: left @ right, LEFT + RIGHT + BUFFER),
        (lambda buffer, left, right: buffer + 1, 2 * BUFFER),
        (lambda buffer, left, right: aten.addmm_(buffer, left, right), LEFT + RIGHT + 2 * BUFFER),
        (lambda buffer, left, right: buffer.t(), 0),
        (lambda buffer, left, right: buffer.split(4), 0),
        (lambda buffer, left, right: buffer[0].expand(8, 6) + buffer, 3 * BUFFER),
    ],
    ids=["product", "sum", "product added in place", "transpose", "views", "broadcast"],
)
def test_bytes(operation: Callable[..., Any], moved: int) -> None:
    module = traced(operation, torch.ones(8, 6), torch.ones(8, 5), torch.ones(5, 6))
    assert node_bytes(calls(module)[-1]) == moved


@torch.library.custom_op("costs::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_formula_registered_later_counts() -> None:
    module = traced(double, torch.ones(3))
    assert operators_without_formula(module.graph) == {"costs.double"}
    operator = torch.ops.costs.double
    register_flop_formula(operator)(lambda shape, out_shape=None: shape[0])
    try:
        assert sum(map(node_flops, calls(module))) == 3
        assert not operators_without_formula(module.graph)
    finally:
        del flop_registry[operator]


def test_seconds_are_launch_and_the_longer_of_arithmetic_and_traffic() -> None:
    large = torch.ones(1000, 1000)
    module = traced(lambda x: (x @ x).t() + 1, large)
    product, view, add = calls(module)
    assert node_seconds(product, MACHINE) == pytest.approx(1 + max(2e9 / 0.5e9, 8e6 / 1e5))
    assert node_seconds(view, MACHINE) == 0
    assert node_seconds(add, MACHINE) == pytest.approx(1 + 8e6 / 1e5)
    assert graph_seconds(module.graph, MACHINE) == pytest.approx(2 + 80 + 80)
    (half,) = calls(traced(torch.mm, large.bfloat16(), large.bfloat16()))
    fast = Hardware("memory is free", peak=MACHINE.peak, bandwidth=1e20)
    assert node_seconds(half, fast) == pytest.approx(2e9 / 4e9)
