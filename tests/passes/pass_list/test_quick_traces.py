"""Traces while a pass runs: the same graphs, torch as before afterwards."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace
from torch.fx.experimental import proxy_tensor

from tests.support.live_storages import leave_aside
from zbcompile.passes.pass_list.run_passes import SILENT, Pass
from zbcompile.passes.torch_private import _BOXED, boxed, make_fx


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


def run(function: Callable[[None], Any]) -> Any:
    return SILENT.run(Pass("trace", "traces", function), None)


def calls(graph: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_a_trace_of_modules_is_torchs() -> None:
    layer, x = Layer(), torch.ones(2, 4)
    quick = run(lambda _: make_fx(lambda x: layer(x))(x))
    assert calls(quick) == calls(make_fx(lambda x: layer(x))(x))


def test_a_symbolic_trace_inside_keeps_its_modules() -> None:
    layer, inside = Layer(), []

    def traced(x: Tensor) -> Tensor:
        with proxy_tensor.disable_proxy_modes_tracing():
            inside.append(fx.symbolic_trace(layer))
        return x + 1

    run(lambda _: make_fx(traced)(torch.ones(2, 4)))
    assert [node.target for node in inside[0].graph.nodes if node.op == "call_module"] == ["inner"]


def test_torch_is_as_before_after_a_pass_that_fails() -> None:
    names = [(_symbolic_trace, "_new_patcher"), (proxy_tensor, "dispatch_trace"), (nn.Module, "__call__")]
    before = [getattr(owner, name) for owner, name in names]

    def failing(x: Tensor) -> Tensor:
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        run(lambda _: make_fx(failing)(torch.ones(2)))
    assert [getattr(owner, name) for owner, name in names] == before


@pytest.mark.slow
def test_one_copy_to_run_of_each_graph_and_no_longer_than_it() -> None:
    leave_aside()
    gc.collect()  # a copy that has gone may have held another graph
    graph, before = make_fx(torch.tanh)(torch.ones(2)), len(_BOXED)
    assert boxed(graph) is boxed(graph)
    assert len(_BOXED) == before + 1
    del graph
    gc.collect()
    assert len(_BOXED) == before
