"""Where real models are cut: against every choice of cuts, within limits, by name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from gpt import GPT, next_byte_loss
from targets import llama, unet
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import LaidOut, lay_out_step
from zbcompile.compiler.cut_planning import plan_cuts
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.graph.fx import is_getitem
from zbcompile.passes.graph.storage import is_view
from zbcompile.passes.partition.balance import LoadRow, heaviest_piece
from zbcompile.passes.partition.node_costs import predicted_seconds
from zbcompile.passes.partition.search import THINNER, Cuts
from zbcompile.schedules import Schedule, build

SCHEDULES = (("zb-h1", 3, None), ("interleaved-1f1b", 2, 2), ("zb-v", 2, None))


class HeavyHead(nn.Module):
    """Light layers and an output layer that outweighs them."""

    def __init__(self, blocks: int, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(blocks))
        self.head = nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _gpt() -> zbcompile.Example:
    tokens = torch.randint(256, (2, 33))
    return zbcompile.Example(
        GPT(layers=4, width=32, heads=4, length=32),
        (tokens[:, :-1],),
        loss=next_byte_loss,
        target=tokens[:, 1:].clone(),
    )


def _head() -> zbcompile.Example:
    return zbcompile.Example(HeavyHead(12, 512), (torch.randn(64, 16),), loss=F.mse_loss, target=torch.randn(64, 512))


def _draw(example: zbcompile.Example) -> LaidOut:
    return lay_out_step(example.model, one_microbatch(example), example.loss)


@dataclass(frozen=True)
class Problem:
    """A drawn model and every choice of cuts for a schedule, with what each weighs and the widest boundary."""

    laid_out: LaidOut
    schedule: Schedule

    @property
    def ranks_of(self) -> list[int]:
        return [self.schedule.placement.rank(stage) for stage in range(self.schedule.stages)]

    def row(self) -> LoadRow:
        totals = [0.0, *accumulate(predicted_seconds(self.laid_out.line))]
        return LoadRow(totals, self.ranks_of, heaviest_piece(totals, [0, *self.places, len(self.laid_out.line.nodes)]))

    @property
    def places(self) -> list[int]:
        return [i + 1 for i, allowed in enumerate(self.laid_out.line.allowed[:-1]) if allowed]

    def choices(self) -> Sequence[tuple[int, ...]]:
        return list(combinations(self.places, self.schedule.stages - 1))

    def plan(self, **choices: Any) -> Cuts:
        return plan_cuts(self.laid_out.line, self.schedule, Choices(**choices))

    def edges(self, cuts: Cuts) -> list[int]:
        return [index + 1 for index in cuts.after]


@pytest.fixture(scope="module")
def laid_out() -> dict[str, LaidOut]:
    made = {"gpt": _gpt(), "head": _head(), "llama": zbcompile.Example(*llama()), "unet": zbcompile.Example(*unet())}
    return {name: _draw(example) for name, example in made.items()}


def _problem(laid_out: Mapping[str, LaidOut], model: str, schedule: tuple[str, int, int | None]) -> Problem:
    name, ranks, chunks = schedule
    return Problem(laid_out[model], build(name, ranks, 2 * ranks, chunks=chunks))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)  # every model and every schedule once
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("model", ["gpt", "head", "unet"])
def test_balanced_within_the_tolerance_and_as_thin_as_that_allows(
    model: str, schedule: tuple[str, int, int | None], laid_out: dict[str, LaidOut]
) -> None:
    problem = _problem(laid_out, model, schedule)
    row, line = problem.row(), problem.laid_out.line
    width = {edge: line.boundary_bytes(edge - 1) for edge in problem.places}
    weighed = [(row.heaviest(cuts), max(width[edge] for edge in cuts)) for cuts in problem.choices()]
    best = min(heaviest for heaviest, _ in weighed)
    thinnest = min(widest for heaviest, widest in weighed if heaviest <= best * THINNER)
    found = problem.plan()
    assert row.heaviest(problem.edges(found)) <= best * THINNER * (1 + 1e-6)
    assert max(found.boundary) == thinnest


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_what_every_stage_can_make_for_itself_crosses_no_boundary(model: str, laid_out: dict[str, LaidOut]) -> None:
    """Position ids, masks and rotary tables stay at home: what travels has gradients, as the hidden state has."""
    problem = _problem(laid_out, model, ("zb-v", 2, None))
    line = problem.laid_out.line
    for place in problem.plan().after:
        crossing = line.live[place]
        assert crossing
        assert all(node.meta["differentiable"] for node in crossing)
        assert not is_view(line.nodes[place])
    assert not any(node.target is torch.ops.aten.arange.default for node in line.nodes)


@pytest.mark.parametrize("model", ["gpt", "llama", "unet"])
def test_no_place_is_at_a_view_or_a_tuple(model: str, laid_out: dict[str, LaidOut]) -> None:
    line = laid_out[model].line
    for node, crossing, allowed in zip(line.nodes, line.live, line.allowed, strict=True):
        if allowed:
            assert is_getitem(node) or not is_view(node)
            assert all(isinstance(value.meta["val"], Tensor) for value in crossing)


def test_cuts_by_name(laid_out: dict[str, LaidOut]) -> None:
    problem = _problem(laid_out, "gpt", ("zb-h1", 3, None))
    line = problem.laid_out.line
    chosen = problem.plan()
    assert problem.plan(balance=chosen.names).after == chosen.after
    found = problem.plan(balance=("blocks.3.mlp_norm", "blocks.1"))
    following = [line.nodes[index + 1] for index in found.after]
    paths = [list(node.meta["nn_module_stack"].values())[-1][0] for node in following]
    assert found.basis == "names"
    assert paths == ["model.blocks.1.attention_norm", "model.blocks.3.mlp_norm"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("blocks.1",), "names 1 cut; the schedule has 3 stages, which need 2"),
        (("blocks.1", "blocks.7"), r"names 'blocks.7', which is neither a module.*near it are blocks"),
        (("blocks.1", "blocks.1.attention_norm"), "the same cut twice: 'blocks.1' and 'blocks.1.attention_norm'"),
        (("blocks.1", "token"), "asks for a cut at 'token'.*The nearest place is after"),
    ],
)
def test_wrong_names(names: tuple[str, ...], says: str, laid_out: dict[str, LaidOut]) -> None:
    with pytest.raises(zbcompile.CompileError, match=says):
        _problem(laid_out, "gpt", ("zb-h1", 3, None)).plan(balance=names)


def test_a_heavy_head_is_said(laid_out: dict[str, LaidOut]) -> None:
    said = _problem(laid_out, "head", ("zb-h1", 4, None)).plan().overweight
    assert re.match(
        r"stage 2 carries 1\.\d\d times the mean load, .* linear_12 in head alone is 100% of its load", said
    )
    assert "2 ranks (then 1." in said
    assert "vocab=1, which shards an output layer" in said
    assert _problem(laid_out, "gpt", ("zb-h1", 2, None)).plan().overweight == ""


@pytest.mark.slow
def test_a_heavy_head_is_said_once_when_compiling(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = zbcompile.pipeline(HeavyHead(2, 512), schedule="1f1b", ranks=2, microbatches=2, loss=F.mse_loss)
    for rows in (8, 16):
        pipe.compile(torch.randn(rows, 16), target=torch.randn(rows, 512))
    assert capsys.readouterr().out.count("times the mean load") == 1


@pytest.mark.slow
@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize("balance", ["flops", ["layers.2", "layers.4", "layers.5"]])
def test_gradients_do_not_depend_on_the_cuts(balance: Any) -> None:
    torch.manual_seed(0)
    model, eager = (nn.Sequential() for _ in range(2))
    for one in (model, eager):
        one.add_module("layers", nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8))))
    eager.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    pipe = zbcompile.pipeline(
        model, schedule="zb-v", ranks=2, microbatches=4, loss=F.mse_loss, exact=True, balance=balance
    )
    pipe.step(x, target=y)
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.mse_loss(eager(part), target) / 4).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"balance": "flop"}, "balance='flop'; expected \"flops\", a list"),
        ({"balance": [2]}, "a list with the names of all cuts"),
        ({"memory": -1}, "memory=-1; expected a positive number"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(zbcompile.PipelineError, match=says):
        zbcompile.pipeline(nn.Linear(2, 2), ranks=1, **options)
