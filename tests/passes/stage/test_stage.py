"""Rewritten pass graphs: accumulation, waits behind other work, equal graphs of equal layers."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gpt import GPT, next_byte_loss
from tests.passes.test_bits import batches_of, text
from tests.support.pass_graph_runner import Batch, Runner, eager_step
from zbcompile import schedules
from zbcompile.passes.capture.export import export_training_step
from zbcompile.passes.compile_step import CompiledStep, compile_graph, compile_step
from zbcompile.passes.graph.process_groups import is_collective, is_wait
from zbcompile.passes.graph.roles import ACCUMULATOR, WEIGHT_GRADIENT, Slot
from zbcompile.passes.stage.accumulate import accumulate
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.sink_waits import sink_waits
from zbcompile.passes.step_graph import Label

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def rewritten(compiled: CompiledStep, model: nn.Module, exact: bool) -> dict[Label, PassGraph]:
    """Returns the passes with gradients added in place."""
    buffers = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    return {
        label: accumulate(graph, buffers, exact=exact) for label, graph in compiled.passes.items()
    }


def summed(compiled: CompiledStep, model: nn.Module, batches: list[Batch], exact: bool) -> Any:
    """Returns the gradients of a step whose passes add them into buffers."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    class Accumulating(Runner):
        def _input(self, graph: PassGraph, slot: Slot, microbatch: int) -> Tensor:
            if slot.role == ACCUMULATOR:
                return sums[slot.name].detach()
            return super()._input(graph, slot, microbatch)

    step = replace(compiled, passes=rewritten(compiled, model, exact))
    orders = schedules.build("zb-h1", ranks=2, microbatches=len(batches)).orders
    Accumulating(step, model, batches, seed=5).run(orders)
    return sums


@pytest.mark.parametrize("exact", [True, False])
def test_gradients_are_added_in_place(exact: bool) -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, length=16, dropout=0.1, tied=False)
    batches = batches_of(text)
    compiled = compile_step(model, *batches[0], next_byte_loss, ranks_of=[0, 1], exact=exact)
    found = summed(compiled, model, batches, exact)
    expected = eager_step(model, batches, next_byte_loss, seed=5).gradients
    for name, gradient in expected.items():
        if exact:
            assert torch.equal(found[name], gradient), name
        else:
            assert (found[name] - gradient).abs().max() <= 2e-6 * gradient.abs().max(), name
    passes = rewritten(compiled, model, exact)
    targets = {node.target for graph in passes.values() for node in graph.calls}
    assert (aten.addmm_.default in targets) is not exact
    assert (aten.index_add_.default in targets) is not exact
    assert (aten.embedding_dense_backward.default in targets) is exact
    assert not [s for graph in passes.values() for s in graph.outputs if s.role == WEIGHT_GRADIENT]


def llama(layers: int) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=64, **sizes)
    return LlamaForCausalLM(config)


def gpt2(layers: int) -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=layers, n_embd=32, n_head=4, vocab_size=64, n_positions=16)
    config.update(dropout)
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_equal_layers_have_equal_graphs(
    make: Callable[[int], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight layers on four stages, cut at layers: the two middle stages are compiled once."""
    torch.manual_seed(0)
    model, ids = make(8), torch.randint(64, (2, 16))
    step = export_training_step(model, (), {"input_ids": ids, "labels": ids})
    layers = layer_cuts(step, 8)
    monkeypatch.setattr(
        "zbcompile.passes.compile_step.balanced_cuts",
        lambda step, line, *_: layers(line),
    )
    passes = compile_graph(step, ranks_of=range(4)).passes
    for kind in "FBW":
        one, other = passes[Label(1, kind)], passes[Label(2, kind)]
        assert one.fingerprint == other.fingerprint
        assert one.inputs != other.inputs
    assert passes[Label(0, "F")].fingerprint != passes[Label(1, "F")].fingerprint


def layer_cuts(step: Any, layers: int) -> Callable[[Any], tuple[int, ...]]:
    """Returns a function from a line to the cuts between every two layers: where the fewest bytes
    cross between the layers' first nodes."""

    def cuts(line: Any) -> tuple[int, ...]:
        first: dict[int, int] = {}
        for index, node in enumerate(line.nodes):
            for path, _ in (node.meta.get("nn_module_stack") or {}).values():
                match = re.search(r"(?:layers|\bh)\.(\d+)$", path)
                if match:
                    first.setdefault(int(match.group(1)), index)
        return tuple(first[layer] for layer in range(2, layers, 2))

    return cuts


def chain(works: list[int], kind: str = "F", weights: int = 0) -> PassGraph:
    """So many operations each, with a collective and its wait between two of these."""
    graph = Graph()
    value = first = graph.placeholder("input_0")
    for number, work in enumerate(works, 1):
        for _ in range(work):
            value = graph.call_function(aten.sin.default, (value,))
        if number < len(works):
            sent = graph.call_function(c10d.all_to_all_single.default, (value, [4], [4], "tp"))
            value = graph.call_function(c10d.wait_tensor.default, (sent,))
    extra = [graph.call_function(aten.cos.default, (first,)) for _ in range(weights)]
    graph.output((value, *extra))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, device="meta")
    outputs = (Slot("gradient", "x"), *(Slot(WEIGHT_GRADIENT, str(i)) for i in range(weights)))
    return PassGraph(1, kind, GraphModule({}, graph), (Slot("activation", "x"),), outputs)


def exposed(order: list[Node]) -> int:
    """Returns how many collectives have nothing between their begin and their wait."""
    return sum(
        order.index(wait) - order.index(wait.all_input_nodes[0]) == 1
        for wait in filter(is_wait, order)
    )


def test_weight_gradients_fill_the_waits() -> None:
    graph = chain([2, 2], kind="BW", weights=3)
    assert exposed(graph.calls) == 1
    sunk = sink_waits(graph)
    assert exposed(sunk.calls) == 0
    assert len(sunk.calls) == len(graph.calls)
    assert sink_waits(chain([4])).calls
    assert sum(map(is_collective, sunk.calls)) == 1
