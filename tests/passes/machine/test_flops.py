"""Operations counted from a graph's values, beside torch's own counter around a run of it."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from tests.support.training import ROWS, Case, pipeline_of, problem_of
from zbcompile.passes.graph.fx import like
from zbcompile.passes.machine import flops
from zbcompile.passes.machine.flops import count_flops
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import FakeTensorMode, make_fx

MODELS = ("gpt-tied", "mixtral", "unet")
MADE_OF_OTHERS = (torch.ops.aten.silu_backward.default,)  # to torch, so such a call is run


@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_as_torchs_counter(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if, as in most graphs, nothing is run."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for piece in pieces_of(model):
        expected = counted_by_run(piece.module, mode)
        with monkeypatch.context() as patch:
            if not any(node.target in MADE_OF_OTHERS for node in piece.module.graph.nodes):
                patch.setattr(flops, "_flops_by_run", no_run)
            assert count_flops(piece.module, mode) == expected
        assert sum(expected.values()) > 0


def no_run(*_: object) -> None:
    pytest.fail("a call was run")


class Run(Interpreter):
    """Notes what torch's counter counts for each call."""

    def __init__(self, module: GraphModule, counter: FlopCounterMode) -> None:
        super().__init__(module)
        self.counter = counter
        self.counts: dict[Node, int] = {}

    def run_node(self, n: Node) -> Any:
        before = self.counter.get_total_flops()
        value = super().run_node(n)
        if n.op == "call_function":
            self.counts[n] = self.counter.get_total_flops() - before
        return value


def counted_by_run(module: GraphModule, mode: FakeTensorMode) -> dict[Node, int]:
    """By torch's counter, with our formulas for what it lacks, around a run of the whole graph."""
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with mode, torch.no_grad(), flops._counter() as counter:
        run = Run(module, counter)
        run.run(
            *(like(v) if isinstance(v, Tensor) else v for v in values), enable_io_processing=False
        )
    return run.counts


def pieces_of(model: str) -> list[PassGraph]:
    case = Case(model, "zb-h1", 2, 2)
    batch = problem_of(model).batches(1, case.microbatches * ROWS)[0]
    pipe = pipeline_of(case)
    pipe.compile(
        *batch.args, **batch.kwargs, **({} if batch.target is None else {"target": batch.target})
    )
    return [piece for stage in pipe.program.stages for piece in stage.pieces.values()]


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
PRODUCTS: list[tuple[Callable[..., Tensor], tuple[Tensor, ...], int]] = [
    (torch.mv, (torch.ones(3, 4), torch.ones(4)), 12),
    (torch.matmul, (torch.ones(3, 4), torch.ones(4)), 12),
    (torch.dot, (torch.ones(5), torch.ones(5)), 5),
    (torch.addmv, (torch.ones(3), torch.ones(3, 4), torch.ones(4)), 12),
    (torch.addbmm, (torch.ones(3, 2), torch.ones(5, 3, 4), torch.ones(5, 4, 2)), 120),
    (experts, (torch.ones(10, 16, **HALF), torch.ones(3, 16, 8, **HALF), ENDS), 10 * 16 * 8),
    (weight_of_experts, (torch.ones(10, 16, **HALF), torch.ones(10, 8, **HALF), ENDS), 10 * 16 * 8),
    (experts, (torch.ones(10, 16), torch.ones(3, 16, 8), ENDS), 10 * 16 * 8),
    (weight_of_experts, (torch.ones(10, 16), torch.ones(10, 8), ENDS), 10 * 16 * 8),
    (in_turn, (torch.ones(10, 16), torch.ones(3, 16, 8), ENDS), 3 * 10 * 16 * 8),
]


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    PRODUCTS,
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_products_that_torch_does_not_count(
    function: Callable[..., Tensor], arguments: tuple[Tensor, ...], expected: int
) -> None:
    importlib.import_module("transformers.integrations.moe")
    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in arguments]
        module = make_fx(function)(*fakes)
    assert sum(count_flops(module, mode).values()) == 2 * expected
    assert sum(counted_by_run(module, mode).values()) == 2 * expected


@torch.library.custom_op("costs::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_formula_registered_later_counts() -> None:
    mode = FakeTensorMode()
    with mode:
        module = make_fx(double)(torch.ones(3))
    operator = torch.ops.costs.double
    register_flop_formula(operator)(lambda shape, out_shape=None: shape[0])
    try:
        assert sum(count_flops(module, mode).values()) == 3
    finally:
        del flop_registry[operator]
