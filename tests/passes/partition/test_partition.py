"""Cuts of real models: against every choice of cuts, within limits, by name."""

from collections.abc import Mapping
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
from zbcompile.compiler.compile_example import compile_example, one_microbatch
from zbcompile.compiler.compile_model import choose_cuts, export_step
from zbcompile.compiler.overweight import explain_overweight
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.graph.fx import is_view, operator_name
from zbcompile.passes.partition.balance import LoadRow, heaviest_piece
from zbcompile.passes.partition.balance_stages import TOLERANCE, node_loads
from zbcompile.passes.partition.cut_points import ForwardLine, forward_line
from zbcompile.passes.step_graph import StepGraph
from zbcompile.schedules import Schedule, build

MACHINE = Hardware.find("cpu-core")
SCHEDULES = (("zb-h1", 3, None), ("interleaved-1f1b", 2, 2), ("zb-v", 2, None))


class HeavyHead(nn.Module):
    """Light layers and an output layer that outweighs them."""

    def __init__(self, blocks: int, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(blocks)
        )
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
    return zbcompile.Example(
        HeavyHead(12, 4096), (torch.randn(64, 16),), loss=F.mse_loss, target=torch.randn(64, 4096)
    )


@dataclass(frozen=True)
class Problem:
    """An exported model and every choice of cuts for a schedule, with what each weighs and the
    widest boundary."""

    step: StepGraph
    schedule: Schedule

    @property
    def line(self) -> ForwardLine:
        return forward_line(self.step)

    @property
    def ranks_of(self) -> list[int]:
        return [self.schedule.placement.rank(stage) for stage in range(self.schedule.stages)]

    def row(self) -> LoadRow:
        line = self.line
        totals = [0.0, *accumulate(node_loads(self.step, line, MACHINE))]
        return LoadRow(
            totals, self.ranks_of, heaviest_piece(totals, [0, *line.cuts, len(line.nodes)])
        )

    def plan(self, **choices: Any) -> list[int]:
        return list(choose_cuts(self.step, self.line, CompileOptions(**choices), self.ranks_of))

    def overweight(self) -> str:
        return explain_overweight(
            self.line, node_loads(self.step, self.line, MACHINE), self.row(), self.plan()
        )


@pytest.fixture(scope="module")
def exported() -> dict[str, StepGraph]:
    made = {
        "gpt": _gpt(),
        "head": _head(),
        "llama": zbcompile.Example(*llama()),
        "unet": zbcompile.Example(*unet()),
    }
    return {
        name: export_step(example.model, one_microbatch(example), example.loss).step
        for name, example in made.items()
    }


def _problem(
    exported: Mapping[str, StepGraph], model: str, schedule: tuple[str, int, int | None]
) -> Problem:
    name, ranks, chunks = schedule
    return Problem(exported[model], build(name, ranks, 2 * ranks, chunks=chunks))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)  # every model and every schedule once
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("model", ["gpt", "head", "unet"])
def test_balanced_within_the_tolerance(
    model: str, schedule: tuple[str, int, int | None], exported: dict[str, StepGraph]
) -> None:
    problem = _problem(exported, model, schedule)
    row, line = problem.row(), problem.line
    choices = combinations(line.cuts, problem.schedule.stages - 1)
    best = min(row.heaviest(cuts) for cuts in choices)
    assert row.heaviest(problem.plan()) <= best * TOLERANCE * (1 + 1e-6)


@pytest.mark.slow
def test_equal_layers_are_cut_at_equal_places() -> None:
    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(16))
    model, x = nn.Sequential(*layers), torch.ones(256, 64)
    example = zbcompile.Example(model, (x,), loss=F.mse_loss, target=x)
    program = compile_example(example, build("1f1b", 2, 4), CompileOptions()).program
    assert {len(stage.parameters) for stage in program.stages} == {32}


def test_cuts_depend_on_the_hardware() -> None:
    """A machine whose arithmetic is free balances traffic, one without memory traffic products."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)), *(nn.GELU() for _ in range(12)))
    x = torch.ones(512, 256)
    example = zbcompile.Example(model, (x,), loss=F.mse_loss, target=x)
    step = export_step(model, one_microbatch(example), F.mse_loss).step
    products = Hardware("products", {"float32": 1e9}, bandwidth=1e20)
    traffic = Hardware("traffic", {"float32": 1e20}, bandwidth=1e9)
    first, second = (
        choose_cuts(step, forward_line(step), CompileOptions(hardware=machine), (0, 1))
        for machine in (products, traffic)
    )
    assert first[0] < second[0]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_what_every_stage_can_make_for_itself_is_not_on_the_line(
    model: str, exported: dict[str, StepGraph]
) -> None:
    """Position ids, masks and rotary tables are computed where they are read."""
    line = _problem(exported, model, ("zb-v", 2, None)).line
    assert not any(node.target is torch.ops.aten.arange.default for node in line.nodes)
    assert any(node.target is torch.ops.aten.arange.default for node in line.free)


@pytest.mark.parametrize("model", ["gpt", "llama", "unet"])
def test_no_place_is_at_a_view_or_a_tuple(model: str, exported: dict[str, StepGraph]) -> None:
    line = forward_line(exported[model])
    for cut in line.cuts:
        node = line.nodes[cut - 1]
        assert (
            operator_name(node) == "getitem"
            or not is_view(node)
            or node.target is torch.ops.aten.detach.default
        )
        assert isinstance(node.meta["val"], Tensor)
        assert line.crossing_bytes[cut]


@pytest.mark.slow
def test_logits_cross_no_cut_that_can_be_avoided() -> None:
    """The loss of many words takes long, but sending their logits would take longer."""
    tokens = torch.randint(256, (2, 33))
    model = GPT(layers=4, width=32, heads=4, length=32)
    model.head = nn.Linear(32, 20_000, bias=False)
    example = zbcompile.Example(
        model, (tokens[:, :-1],), loss=next_byte_loss, target=tokens[:, 1:].clone()
    )
    problem = Problem(
        export_step(model, one_microbatch(example), next_byte_loss).step, build("zb-h1", 4, 8)
    )
    crossing = problem.line.crossing_bytes
    assert max(crossing[cut] for cut in problem.plan()) < 2 * 32 * 20_000


def test_cuts_by_name(exported: dict[str, StepGraph]) -> None:
    problem = _problem(exported, "gpt", ("zb-h1", 3, None))
    line = problem.line
    chosen = problem.plan()
    assert problem.plan(balance=tuple(line.nodes[cut - 1].name for cut in chosen)) == chosen
    actual = [line.nodes[cut] for cut in problem.plan(balance=("blocks.3.mlp_norm", "blocks.1"))]
    paths = [list(node.meta["nn_module_stack"].values())[-1][0] for node in actual]
    assert paths == ["model.blocks.1.attention_norm", "model.blocks.3.mlp_norm"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("blocks.1",), "names 1 cut; the schedule has 3 stages, which need 2"),
        (
            ("blocks.1", "blocks.7"),
            r"names 'blocks.7', which is neither a module.*near it are blocks",
        ),
        (
            ("blocks.1", "blocks.1.attention_norm"),
            "the same cut twice: 'blocks.1' and 'blocks.1.attention_norm'",
        ),
        (("blocks.1", "token"), "asks for a cut at 'token'.*The nearest place is after"),
    ],
)
def test_wrong_names(names: tuple[str, ...], says: str, exported: dict[str, StepGraph]) -> None:
    with pytest.raises(zbcompile.CompileError, match=says):
        _problem(exported, "gpt", ("zb-h1", 3, None)).plan(balance=names)


@pytest.mark.slow
def test_a_heavy_head_is_said_once_when_compiling(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = zbcompile.pipeline(
        HeavyHead(2, 4096), schedule="1f1b", ranks=2, microbatches=2, loss=F.mse_loss
    )
    for rows in (8, 16):
        pipe.compile(torch.randn(rows, 16), target=torch.randn(rows, 4096))
    output = capsys.readouterr().out
    assert output.count("times the mean load") == 1
    assert "a V schedule such as zb-v" in output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"balance": "flop"}, "balance='flop'; expected \"flops\", or a list"),
        ({"balance": [2]}, "a list with the names of all cuts"),
        ({"memory": -1}, "memory=-1; expected a positive number"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(zbcompile.PipelineError, match=says):
        zbcompile.pipeline(nn.Linear(2, 2), ranks=1, **options)
