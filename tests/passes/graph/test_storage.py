"""Which operations are views."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zbcompile.passes.graph.fx import is_view
from zbcompile.passes.torch_private import make_fx


@pytest.mark.parametrize(
    ("operation", "view"),
    [
        (lambda buffer: buffer + 1, False),
        (lambda buffer: torch.ops.aten.add_(buffer, 1), False),
        (lambda buffer: buffer.t(), True),
        (lambda buffer: buffer.split(4), True),
    ],
    ids=["sum", "sum in place", "transpose", "views"],
)
def test_views(operation: Callable[..., Tensor], view: bool) -> None:
    graph = make_fx(lambda value: operation(value), tracing_mode="fake")(torch.ones(8, 6)).graph
    node = next(node for node in graph.nodes if node.op == "call_function")
    assert is_view(node) == view
