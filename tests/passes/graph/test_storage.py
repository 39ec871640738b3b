"""What an operation moves, and what is a view."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zbcompile.passes.graph.fx import is_view
from zbcompile.passes.graph.storage import bytes_moved
from zbcompile.passes.torch_private import make_fx

BUFFER, LEFT, RIGHT = 4 * 8 * 6, 4 * 8 * 5, 4 * 5 * 6  # bytes
aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operation", "moved", "view"),
    [
        (lambda buffer, left, right: left @ right, LEFT + RIGHT + BUFFER, False),
        (lambda buffer, left, right: buffer + 1, 2 * BUFFER, False),
        (
            lambda buffer, left, right: aten.addmm_(buffer, left, right),
            LEFT + RIGHT + 2 * BUFFER,
            False,
        ),
        (lambda buffer, left, right: aten.add_(buffer, 1), 2 * BUFFER, False),
        (lambda buffer, left, right: buffer.t(), 0, True),
        (lambda buffer, left, right: buffer.split(4), 0, True),
    ],
    ids=["product", "sum", "product added in place", "sum in place", "transpose", "views"],
)
def test_bytes_and_views(operation: Callable[..., Tensor], moved: int, view: bool) -> None:
    tensors = torch.ones(8, 6), torch.ones(8, 5), torch.ones(5, 6)
    graph = make_fx(lambda *values: operation(*values), tracing_mode="fake")(*tensors).graph
    node = next(node for node in graph.nodes if node.op == "call_function")
    assert (bytes_moved(node), is_view(node)) == (moved, view)
