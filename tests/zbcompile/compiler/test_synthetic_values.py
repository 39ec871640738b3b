"""Values to time operations on: indices stay inside what they index, and reach all of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zbcompile.compiler.measure_nodes import values_like
from zbcompile.passes.torch_private import FakeTensorMode, make_fx

ROWS, LENGTH, WIDTH = 64, 8, 16


def table(*shape: int) -> Tensor:
    return torch.zeros(shape)


def index(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def experts(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=ends)


def weights_of_experts(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows.bfloat16().t(), gradient.bfloat16(), offs=ends)


Case = tuple[Callable[..., Any], tuple[Tensor, ...], int]
CASES: dict[str, Case] = {  # what reads the index, its arguments, and the length of what is indexed
    "embedding": (
        lambda i, w: F.embedding(i.view(-1), w),
        (index(ROWS, 2), table(LENGTH, WIDTH)),
        LENGTH,
    ),
    "rows": (lambda x, i: x[i], (table(LENGTH, 2), index(ROWS)), LENGTH),
    "columns": (lambda x, i: x[:, i], (table(2, LENGTH), index(ROWS)), LENGTH),
    "gather": (lambda x, i: x.gather(1, i), (table(ROWS, LENGTH), index(ROWS, 2)), LENGTH),
    "select": (lambda x, i: x.index_select(0, i), (table(LENGTH, 2), index(ROWS)), LENGTH),
    "add": (
        lambda x, i, y: x.index_add(0, i, y),
        (table(LENGTH, 2), index(ROWS), table(ROWS, 2)),
        LENGTH,
    ),
    "put": (
        lambda x, i, y: x.index_put((i,), y),
        (table(LENGTH, 2), index(ROWS), table(ROWS, 2)),
        LENGTH,
    ),
    "scatter": (
        lambda x, i, y: x.scatter_add(0, i, y),
        (table(LENGTH), index(ROWS), table(ROWS)),
        LENGTH,
    ),
    "loss": (lambda x, i: F.cross_entropy(x, i), (table(ROWS, LENGTH), index(ROWS)), LENGTH),
    "two tables": (
        lambda x, y, i: x[i] + y[i],
        (table(LENGTH), table(2 * LENGTH), index(ROWS)),
        LENGTH,
    ),
}


def values_for(
    function: Callable[..., Any], arguments: tuple[Tensor, ...]
) -> tuple[Any, list[Tensor]]:
    """The graph of a function, and values for its arguments."""
    with FakeTensorMode() as mode:
        graph = make_fx(function)(*map(mode.from_tensor, arguments))
    return graph, [values_like(node) for node in graph.graph.find_nodes(op="placeholder")]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_indices_reach_all_of_what_they_index(case: Case) -> None:
    function, arguments, length = case
    torch.manual_seed(0)  # one of 600 draws of 64 misses one of eight
    graph, values = values_for(function, arguments)
    (result,) = [value for value in values if value.dtype is torch.int64]
    assert sorted(result.unique().tolist()) == list(range(length))
    graph(*values)


@pytest.mark.parametrize("function", [experts, weights_of_experts])
def test_experts_share_the_rows(function: Callable[..., Tensor]) -> None:
    second = table(4, WIDTH, LENGTH) if function is experts else table(ROWS, LENGTH)
    graph, values = values_for(function, (table(ROWS, WIDTH), second, index(4).int()))
    assert values[2].diff(prepend=torch.zeros(1)).tolist() == [ROWS // 4] * 4
    graph(*values)


def test_integers_that_index_nothing_known_are_zero() -> None:
    _, values = values_for(lambda n: n * 2, (index(ROWS),))
    assert not values[0].any()
