"""Values to time operations on: indices stay inside what they index, and reach all of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zbcompile.compiler.measure_nodes import values_like
from zbcompile.passes.torch_private import FakeTensorMode, make_fx

ROWS, L, WIDTH = 64, 8, 16
ONES, PAIRS = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, 2, dtype=torch.int64)
X: Any = lambda *shape: torch.zeros(shape)  # noqa: E731
CASES: tuple[Any, ...] = (  # what reads the index, and its arguments
    (lambda i, w: F.embedding(i.view(-1), w), PAIRS, X(L, WIDTH)),
    (lambda x, i: x[i], X(L, 2), ONES),
    (lambda x, i: x[:, i], X(2, L), ONES),
    (lambda x, i: x.gather(1, i), X(ROWS, L), PAIRS),
    (lambda x, i: x.index_select(0, i), X(L, 2), ONES),
    (lambda x, i, y: x.index_add(0, i, y), X(L, 2), ONES, X(ROWS, 2)),
    (lambda x, i, y: x.index_put((i,), y), X(L, 2), ONES, X(ROWS, 2)),
    (lambda x, i, y: x.scatter_add(0, i, y), X(L), ONES, X(ROWS)),
    (lambda x, i: F.cross_entropy(x, i), X(ROWS, L), ONES),
    (lambda x, y, i: x[i] + y[i], X(L), X(2 * L), ONES),
)


def values_for(function: Callable[..., Any], *arguments: Tensor) -> list[Tensor]:
    """Values for the arguments of a function, on which it has run."""
    with FakeTensorMode() as mode:
        graph = make_fx(function)(*map(mode.from_tensor, arguments))
    values = [values_like(node) for node in graph.graph.find_nodes(op="placeholder")]
    graph(*values)
    return values


@pytest.mark.parametrize("case", range(len(CASES)))
def test_indices_reach_all_of_what_they_index(case: int) -> None:
    torch.manual_seed(0)  # one of 600 draws of 64 misses one of eight
    values = values_for(*CASES[case])
    (result,) = [value for value in values if value.dtype is torch.int64]
    assert sorted(result.unique().tolist()) == list(range(L))


def test_experts_share_the_rows_and_what_indexes_nothing_known_is_zero() -> None:
    def experts(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=ends)

    of_weights = lambda rows, *rest: experts(rows.t(), *rest)  # noqa: E731
    ends = torch.zeros(4, dtype=torch.int32)
    for function, second in ((experts, X(4, WIDTH, L)), (of_weights, X(ROWS, L))):
        values = values_for(function, X(ROWS, WIDTH), second, ends)
        assert values[2].diff(prepend=torch.zeros(1)).tolist() == [ROWS // 4] * 4
    assert not values_for(lambda n: n * 2, ONES)[0].any()
