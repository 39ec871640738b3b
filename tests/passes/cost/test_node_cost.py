"""FLOPs, bytes and seconds of operations in a graph."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import FlopCounterMode

from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.cost.node_cost import graph_seconds, node_bytes, node_flops, node_seconds
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
    with FakeTensorMode():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors]
        return make_fx(function)(*fakes)


def calls(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weights, offs=ends)


def in_turn(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """transformers' experts where there is no kernel for them, with their backward."""
    made = torch.ops.transformers.grouped_mm_fallback(rows, weights, ends)
    return torch.ops.transformers.grouped_mm_fallback_backward(rows, weights, ends, made)[0]


def layers(x: Tensor, weight: Tensor, kernel: Tensor) -> Tensor:
    """Returns what torch counts too: products, a convolution, and their backward."""
    x, weight, kernel = (tensor.requires_grad_() for tensor in (x, weight, kernel))
    y = F.conv2d((x @ weight)[None], kernel, stride=2)
    y = y.sum() + torch.bmm(x, x.mT).sum()
    return sum(gradient.sum() for gradient in torch.autograd.grad(y, (x, weight, kernel)))


def test_as_torchs_counter() -> None:
    tensors = torch.ones(3, 8, 8), torch.ones(8, 8), torch.ones(4, 3, 2, 2)
    with FlopCounterMode(display=False) as counter:
        layers(*tensors)
    module = traced(layers, *(tensor.detach() for tensor in tensors))
    assert sum(map(node_flops, calls(module))) == counter.get_total_flops() > 0


ENDS = torch.tensor([3, 3, 10], dtype=torch.int32)
HALF = {"dtype": torch.bfloat16}


def one(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


@pytest.mark.parametrize(
    ("function", "tensors", "products"),
    [
        (torch.mv, (one(3, 4), one(4)), 12),
        (torch.dot, (one(5), one(5)), 5),
        (torch.addmv, (one(3), one(3, 4), one(4)), 12),
        (torch.addbmm, (one(3, 2), one(5, 3, 4), one(5, 4, 2)), 120),
        (grouped, (one(10, 16, **HALF), one(3, 16, 8, **HALF), ENDS), 1280),
        (grouped, (one(10, 16, **HALF).t(), one(10, 8, **HALF), ENDS), 1280),
        (in_turn, (one(10, 16), one(3, 16, 8), ENDS), 3 * 1280),
    ],
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
)
def test_bytes(operation: Callable[..., Any], moved: int) -> None:
    module = traced(operation, one(8, 6), one(8, 5), one(5, 6))
    assert node_bytes(calls(module)[-1]) == moved


def test_seconds_are_launch_and_the_longer_of_arithmetic_and_traffic() -> None:
    large = one(1000, 1000)
    module = traced(lambda x: (x @ x).t() + 1, large)
    product, view, add = calls(module)
    assert node_seconds(product, MACHINE) == pytest.approx(1 + max(2e9 / 0.5e9, 8e6 / 1e5))
    assert node_seconds(view, MACHINE) == 0
    assert node_seconds(add, MACHINE) == pytest.approx(1 + 8e6 / 1e5)
    assert graph_seconds(module.graph, MACHINE) == pytest.approx(2 + 80 + 80)
    (half,) = calls(traced(torch.mm, large.bfloat16(), large.bfloat16()))
    fast = Hardware("memory is free", peak=MACHINE.peak, bandwidth=1e20)
    assert node_seconds(half, fast) == pytest.approx(2e9 / 4e9)
