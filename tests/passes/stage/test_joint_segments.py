"""Joint graphs put together from segments: nobody can tell by the graph."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

import zbcompile
from gpt import GPT, next_byte_loss
from zbcompile.compiler import compile_model
from zbcompile.compiler.compile_example import compile_example, one_microbatch
from zbcompile.compiler.compile_model import compile_laid_out, lay_out_step
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.graph.storage import storage_key, tensors_of
from zbcompile.passes.pass_list import passes_in_order
from zbcompile.passes.split.joint_graph import Joint, trace_joint
from zbcompile.passes.stage.joint_segments import segments_of, trace_in_segments
from zbcompile.schedules import build

WIDTH = 8


class Layer(nn.Module):
    """A half with rotary numbers that all layers share, and one whose results are views."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.q, self.wide, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(WIDTH)
        self.q.requires_grad_(not frozen)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q = torch.view_as_complex(self.q(x * x.square().mean(-1, keepdim=True)).unflatten(-1, (-1, 2)))
        x = x + torch.view_as_real(q * turns).flatten(-2)
        a, b = self.wide(self.norm(x)).chunk(2, -1)
        return x + torch.tanh(a) * b


class Turning(nn.Module):
    """An embedding, six layers, some of them frozen or checkpointed, and an output that reads the embedding again if
    `tied`."""

    def __init__(self, tied: bool = False, frozen: int = -1, checkpointed: bool = False) -> None:
        super().__init__()
        self.tied, self.checkpointed = tied, checkpointed
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Layer(i == frozen) for i in range(6))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        turns = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2).float())
        for layer in self.layers:
            x = checkpoint(layer, x, turns, use_reentrant=False) if self.checkpointed else layer(x, turns)
        return x @ self.embed.weight.T if self.tied else x


def _turning(**options: Any) -> zbcompile.Example:
    tokens = torch.randint(16, (2, 4))
    model = Turning(**options)
    return zbcompile.Example(model, (tokens,), loss=F.mse_loss, target=model(tokens).detach())


def _gpt() -> zbcompile.Example:
    tokens = torch.randint(256, (2, 33))
    model = GPT(layers=6, width=64, heads=4, length=32, dropout=0.1)
    return zbcompile.Example(model, (tokens[:, :-1],), loss=next_byte_loss, target=tokens[:, 1:].contiguous())


def _described(joint: Joint) -> list[Any]:
    """Names, operations, layouts, which values share storages, source lines and checkpoint regions."""
    storages, lines = dict[int, int](), list[Any]()
    for node in joint.module.graph.nodes:
        values = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in tensors_of(node.meta.get("val"))]
        shared = [storages.setdefault(storage_key(t), len(storages)) for t in tensors_of(node.meta.get("val"))]
        called = node.name, str(node.target), repr(node.args), repr(node.kwargs)
        lines.append((called, values, shared, origin_of(node), node.meta.get("recompute"), node.meta.get("slot")))
    names = [[(slot, node.name) for slot, node in named] for named in (joint.inputs, joint.outputs)]
    leaving = {name: (value.shape, value.stride()) for name, value in joint.gradient_of_input.items()}
    return [*lines[:-1], *names, leaving]  # what the whole trace returns has None for what has no gradient


def _compare(monkeypatch: pytest.MonkeyPatch, see: Callable[[Any], object]) -> None:
    """Compare every graph that is put together, and `see` what it was made of."""

    def both(*task: Any) -> Joint:
        made = trace_in_segments(*task)
        assert _described(made) == _described(trace_joint(*task[:-1]))
        see(task)
        return made

    monkeypatch.setattr(passes_in_order, "trace_in_segments", both)


@pytest.mark.parametrize(
    ("example", "exact", "most"),
    [
        pytest.param(_gpt, True, 5, id="gpt"),
        pytest.param(_turning, False, 5, id="turning"),
        pytest.param(lambda: _turning(frozen=3), False, 7, id="frozen"),
        pytest.param(lambda: _turning(checkpointed=True), False, 6, id="checkpointed"),
        pytest.param(lambda: _turning(tied=True), False, 6, id="tied"),
    ],
)
def test_it_is_the_graph_of_the_whole_stage(
    example: Callable[[], zbcompile.Example], exact: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a layer's halves are traced once for all stages: `most` segments of all kinds."""
    kept, counts = list[Any](), list[int]()
    _compare(monkeypatch, lambda task: (kept.append(task[-1]), counts.append(len(list(segments_of(task[0]))))))
    compile_example(example(), build("zb-h1", ranks=2, microbatches=4), Choices(exact=exact), lambda ran: None)
    assert kept[0] is kept[-1]
    assert max(counts) > 4
    assert len(kept[0]) <= most


def _is_one(node: Node) -> bool:
    return isinstance(node.meta["val"], Tensor)


def test_a_value_that_is_sent_besides_its_sum_gets_both_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that end inside of layers send what their last segments begin with, too."""
    example, compared = _turning(), list[int]()
    step, choices = (example.model, one_microbatch(example)), Choices()
    laid_out = lay_out_step(*step, example.loss, choices)
    middle, live = len(laid_out.line.nodes) // 2, laid_out.line.live
    ends = [
        end
        for end in range(middle, middle + 24, 2)
        if all(n.op == "call_function" and _is_one(n) for n in live[end - 1])
    ]
    _compare(monkeypatch, lambda task: compared.append(len(list(segments_of(task[0])))))
    schedule = build("1f1b", 2, 4)
    cuts = compile_model.plan_cuts(laid_out.line, schedule, choices)
    for end in ends:
        chosen = replace(cuts, after=(end - 1, *cuts.after[1:]))
        monkeypatch.setattr(compile_model, "plan_cuts", lambda *_, chosen=chosen: chosen)
        compile_laid_out(*step, laid_out, schedule, choices)
    assert len(ends) > 4
    assert min(compared) > 2
