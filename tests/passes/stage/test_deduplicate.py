"""Stages that do the same work are compiled once and renamed: nobody can tell by the programs."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from gpt import GPT, next_byte_loss
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.partition.stage_graphs import Stage
from zbcompile.passes.pass_list.run_passes import Observer, PassRun
from zbcompile.passes.stage import deduplicate
from zbcompile.passes.stage.deduplicate import compile_distinct
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.program.program import Program
from zbcompile.schedules import build

WIDTH = 8


class Tower(nn.Module):
    """Layers of which some differ from the others in one thing: see `make`."""

    def __init__(self, make: Callable[[int], nn.Module], layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(make, range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    """tanh(a(x) + b(x)) * scale, with `b` the layer `a` itself if `tied`."""

    def __init__(self, scale: float = 1.0, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = self.a if tied else nn.Linear(WIDTH, WIDTH)
        self.b.requires_grad_(not frozen)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x) + self.b(x)) * self.scale


class Masked(nn.Module):
    """A skip connection to the end, a mask used everywhere, running statistics in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = x = torch.tanh(x * self.layers[0].weight.sum())
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + norm(torch.tanh(layer(x))) * mask
        return x + first


def _gpt() -> zbcompile.Example:
    tokens = torch.randint(256, (2, 33))
    model = GPT(layers=8, width=64, heads=4, length=32, dropout=0.1)
    return zbcompile.Example(model, (tokens[:, :-1],), loss=next_byte_loss, target=tokens[:, 1:].contiguous())


def _masked() -> zbcompile.Example:
    x = torch.randn(4, WIDTH)
    return zbcompile.Example(Masked(), (x,), {"mask": torch.ones(4, WIDTH)}, F.mse_loss, x)


def _tower(make: Callable[[int], nn.Module]) -> zbcompile.Example:
    x = torch.randn(2, WIDTH)
    return zbcompile.Example(Tower(make), (x,), loss=F.mse_loss, target=x)


def _compiled(example: zbcompile.Example, stages: int, exact: bool = False, observe: Observer | None = None) -> Program:
    """Compiled anew if somebody observes, whatever other tests have compiled."""
    schedule = build("zb-h1", ranks=stages, microbatches=2 * stages)
    return compile_example(example, schedule, Choices(exact=exact), observe).program


def _each_for_itself(
    stages: tuple[Stage, ...], trainable: frozenset[str], make: Callable[..., Any]
) -> tuple[StageProgram, ...]:
    """`compile_distinct` without anything shared."""
    programs, gradients = [], None
    for stage in reversed(stages):
        program, gradients = make(stage, deduplicate.tangents_of(stage, gradients))
        programs.append(program)
    return tuple(reversed(programs))


@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize(("example", "exact"), [(_gpt, False), (_masked, True)])
def test_a_renamed_program_is_what_compiling_the_stage_gives(
    example: Callable[[], zbcompile.Example], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, tuple[StageProgram, ...]] = {}

    def both(stages: tuple[Stage, ...], trainable: frozenset[str], make: Any, *rest: Any) -> tuple[StageProgram, ...]:
        made["alone"] = _each_for_itself(stages, trainable, make)
        made["shared"] = compile_distinct(stages, trainable, make, *rest)
        return made["shared"]

    monkeypatch.setattr("zbcompile.compiler.compile_model.compile_distinct", both)
    _compiled(example(), 4, exact, lambda ran: None)
    assert len({program.original for program in made["shared"]}) < 4
    for alone, shared in zip(made["alone"], made["shared"], strict=True):
        for field in fields(StageProgram):
            if field.name not in ("pieces", "original"):
                assert getattr(alone, field.name) == getattr(shared, field.name), field.name
        for name, piece in alone.pieces.items():
            other = shared.pieces[name]
            assert (piece.inputs, piece.outputs) == (other.inputs, other.outputs)
            assert piece.module.print_readable(False) == other.module.print_readable(False)
            nodes = zip(piece.module.graph.nodes, other.module.graph.nodes, strict=True)
            assert all(origin_of(a) == origin_of(b) for a, b in nodes)


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize(
    ("make", "graphs"),
    [
        (lambda i: Layer(), 3),  # the first stage receives the input, the last has the loss
        (lambda i: Layer(scale=0.5 if i == 2 else 2.0), 4),
        (lambda i: Layer(tied=i == 2), 4),
        (lambda i: Layer(frozen=i == 2), 4),
        (lambda i: Layer().train(i == 2), 3),  # no dropout: the mode changes nothing
    ],
)
def test_graphs_that_differ_in_more_than_names_are_not_shared(make: Callable[[int], nn.Module], graphs: int) -> None:
    program = _compiled(_tower(make), 6)
    assert len({stage.original for stage in program.stages}) == graphs


@pytest.mark.slow
def test_a_stage_is_compiled_once_per_distinct_graph() -> None:
    seen: list[PassRun] = []
    program = _compiled(_gpt(), 4, observe=seen.append)
    joint = [ran.stage for ran in seen if ran.name == "joint"]
    assert sorted(joint) == sorted({stage.original for stage in program.stages})
    assert len(joint) == 3
