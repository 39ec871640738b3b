"""Cuts of real models: against every choice of cuts, within limits, by name."""

from itertools import accumulate, combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import zbcompile
from gpt import GPT, next_byte_loss
from targets import llama, unet
from tests.support.meshes import group_without_peers
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import choose_cuts, export_step
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.graph.fx import is_view, operator_name
from zbcompile.passes.graph.process_groups import is_wait
from zbcompile.passes.partition.balance import LoadRow, heaviest_piece
from zbcompile.passes.partition.balance_stages import TOLERANCE, node_loads
from zbcompile.passes.partition.cut_points import forward_line
from zbcompile.passes.step_graph import StepGraph
from zbcompile.schedules import build

MACHINE = Hardware.find("cpu-core")


def exported(example: zbcompile.Example) -> StepGraph:
    return export_step(example.model, one_microbatch(example), example.loss).step


def gpt(words: int = 256, layers: int = 4) -> zbcompile.Example:
    tokens, model = torch.randint(256, (2, 32)), GPT(layers=layers, width=32, heads=4, length=32)
    model.head = nn.Linear(32, words, bias=False)
    return zbcompile.Example(model, (tokens,), loss=next_byte_loss, target=tokens)


def ranks_of(name: str, ranks: int, chunks: int | None = None) -> list[int]:
    placement = build(name, ranks, 2 * ranks, chunks=chunks).placement
    return [placement.rank(stage) for stage in range(placement.stages)]


def plan(step: StepGraph, ranks: list[int], **choices: Any) -> list[int]:
    return list(choose_cuts(step, forward_line(step), CompileOptions(**choices), ranks))


@pytest.fixture(scope="module")
def step() -> StepGraph:
    return exported(gpt())


def test_balanced_within_the_tolerance() -> None:
    """Of light layers and an output layer that outweighs them."""
    blocks, x = (nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(8)), torch.randn(64, 16)
    model, y = nn.Sequential(*blocks, nn.Linear(16, 4096)), torch.ones(64, 4096)
    step = exported(zbcompile.Example(model, (x,), loss=F.mse_loss, target=y))
    line = forward_line(step)
    totals = [0.0, *accumulate(node_loads(step, line, MACHINE))]
    heaviest = heaviest_piece(totals, [0, *line.cuts, len(line.nodes)])
    for ranks in (ranks_of("zb-v", 2), ranks_of("interleaved-1f1b", 2, 2)):
        row = LoadRow(totals, ranks, heaviest)
        best = min(row.heaviest(cuts) for cuts in combinations(line.cuts, len(ranks) - 1))
        assert row.heaviest(plan(step, ranks)) <= best * TOLERANCE * (1 + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama", "unet"])
def test_what_is_on_the_line(model: str, step: StepGraph) -> None:
    """Position ids and masks are computed where they are read. No place is at a view."""
    if model != "gpt":
        step = exported(zbcompile.Example(*(llama() if model == "llama" else unet())))
    line, arange = forward_line(step), torch.ops.aten.arange.default
    assert not any(node.target is arange for node in line.nodes)
    assert any(node.target is arange for node in line.free) == (model != "unet")
    for cut in line.cuts:
        node = line.nodes[cut - 1]
        apart = operator_name(node) == "getitem" or node.target is torch.ops.aten.detach.default
        assert apart or not is_view(node)
        assert isinstance(node.meta["val"], Tensor)
        assert line.crossing_bytes[cut]


class Exchanging(nn.Module):
    """Layers between which ranks exchange rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = all_to_all_single_autograd(layer(x), None, None, dist.group.WORLD).relu()
        return x


def test_no_cut_is_between_a_collective_and_its_wait() -> None:
    """A wait on another rank would not wait, and the message would be memory that is not filled."""
    x = torch.randn(4, 8)
    with group_without_peers(2):
        line = forward_line(
            exported(zbcompile.Example(Exchanging(), (x,), loss=F.mse_loss, target=x))
        )
    assert sum(map(is_wait, line.nodes)) == 3
    for cut in line.cuts:
        before = set(line.nodes[:cut])
        waits = [node for node in line.nodes[cut:] if is_wait(node)]
        assert not any(before.intersection(wait.all_input_nodes) for wait in waits)


@pytest.mark.slow
def test_logits_cross_no_cut_that_can_be_avoided() -> None:
    """The loss of many words takes long, but sending their logits would take longer."""
    step = exported(gpt(20_000, layers=1))
    crossing = forward_line(step).crossing_bytes
    assert max(crossing[cut] for cut in plan(step, ranks_of("zb-h1", 2))) < 2 * 32 * 20_000


def test_cuts_by_name(step: StepGraph) -> None:
    line, chosen = forward_line(step), plan(step, [0, 1, 2])
    names = tuple(line.nodes[cut - 1].name for cut in chosen)
    assert plan(step, [0, 1, 2], balance=names) == chosen
    cuts = plan(step, [0, 1, 2], balance=("blocks.3.mlp_norm", "blocks.1"))
    paths = [list(line.nodes[cut].meta["nn_module_stack"].values())[-1][0] for cut in cuts]
    assert paths == ["model.blocks.1.attention_norm", "model.blocks.3.mlp_norm"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("blocks.1",), "names 1 cut; the schedule has 3 stages, which need 2"),
        (("blocks.1", "blocks.7"), r"names 'blocks.7', which is neither a module.*it are blocks"),
        (
            ("blocks.1", "blocks.1.attention_norm"),
            "the same cut twice: 'blocks.1' and 'blocks.1.at",
        ),
        (("blocks.1", "token"), "asks for a cut at 'token'.*The nearest place is after"),
    ],
)
def test_wrong_names(names: tuple[str, ...], says: str, step: StepGraph) -> None:
    with pytest.raises(zbcompile.CompileError, match=says):
        plan(step, [0, 1, 2], balance=names)
