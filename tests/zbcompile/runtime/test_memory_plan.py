"""A plan of a step's memory: its places as a function of intervals, and steps whose values lie in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zbcompile
from gpt import GPT, VOCABULARY, next_byte_loss
from tests.support.oracle import Batch, Problem
from tests.support.training import problem_of
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.prediction.predict import predicted_costs
from zbcompile.prediction.rank_memory import rank_memories
from zbcompile.program.program import Program
from zbcompile.runtime.action_loop import Observer, RankRun
from zbcompile.runtime.executable import Executable, StepInput
from zbcompile.runtime.memory_plan import (
    ALIGNMENT,
    Interval,
    MemoryPlan,
    aligned,
    lay_out,
    most_alive,
    plan_memory,
    size_of,
)
from zbcompile.runtime.placed_step import with_places
from zbcompile.runtime.rank_plan import Instruction, instructions_of
from zbcompile.schedules import Schedule, build
from zbcompile.schedules.ir.actions import Action

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "dualpipe-v")


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    first = draw(st.integers(0, 30))
    return Interval(draw(st.integers(0, 5000)), first, first + draw(st.integers(0, 12)))


@given(st.lists(intervals(), max_size=40))
def test_no_two_values_that_are_alive_overlap(values: list[Interval]) -> None:
    offsets = lay_out(values)
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    placed = [(v, o, o + aligned(v.size)) for v, o in zip(values, offsets, strict=True) if v.size]
    for i, (one, low, high) in enumerate(placed):
        for other, its_low, its_high in placed[:i]:
            together = one.first <= other.last and other.first <= one.last
            assert not together or high <= its_low or its_high <= low
    assert max((high for _, _, high in placed), default=0) >= most_alive(values)


def test_large_values_are_stacked_in_the_bytes_that_are_alive() -> None:
    """Every way of first fit, and a skyline, needs 11 units for these, of which 9 are alive at once."""
    lives = [(3, 5, 8), (4, 3, 3), (3, 1, 4), (5, 4, 5), (1, 1, 5), (3, 6, 6), (3, 6, 10)]  # units, first, last
    values = [Interval(ALIGNMENT * size, first, last) for size, first, last in lives]
    assert most_alive(values) == ALIGNMENT * 9
    assert size_of(values, lay_out(values)) == ALIGNMENT * 9


def test_values_one_after_the_other_share_a_place() -> None:
    assert lay_out([Interval(100, 0, 1), Interval(300, 2, 3), Interval(200, 4, 9)]) == [0, 0, 0]
    assert most_alive([Interval(100, 0, 1), Interval(300, 1, 3)]) == 3 * ALIGNMENT


class Written(TorchDispatchMode):
    """Notes where every operation has put its results, under the action that the rank was carrying out; and whether
    any of them outlives its action in memory of its own."""

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        super().__init__()
        self.ranges = [(block.data_ptr(), block.data_ptr() + block.nbytes) for block in blocks]
        self.log: list[tuple[int, Action, int, int]] = []
        self.now: tuple[int, Action] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tensors_of(result) if self.now is not None else ():
            if any(low <= value.data_ptr() < high for low, high in self.ranges):
                self.log.append((*self.now, value.data_ptr(), value.nbytes))
        return result


@dataclass
class Looking(Observer):
    """Records a step: tells the log which action runs, and requires that what waits between actions has no memory of
    its own: it lies in the block, or in memory that stays."""

    written: Written
    placed: Executable
    actions: int = 0

    def begin(self, program: Program, schedule: Schedule) -> "Looking":
        return self

    def end(self) -> None:
        pass

    def __call__(self, of: Sequence[Instruction], run: RankRun, execute: Callable[[], None]) -> None:
        actions = [each.action for each in of]
        self.written.now = (run.rank, actions[0])
        execute()
        self.actions += 1
        stages = run.runs.values()
        waiting = [value for stage in stages for frame in stage.frames.values() for value in frame]
        waiting += [value for values in (*run.outbox.values(), *run.transport.boxes.values()) for value in values]
        staying = staying_in(self.placed)
        factors = {stage.loss_factor.data_ptr() for stage in stages}
        for value in waiting:
            if value is not None and value.numel() and value.data_ptr() not in factors:
                assert value.untyped_storage().data_ptr() in staying, (actions, value.shape)


class Scaled(nn.Module):
    """A layer whose forward writes into buffers, one of which the backward reads as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.norm(self.layer(x)) * self.scale)
        with torch.no_grad():
            self.scale.lerp_(made.abs().mean(0), 0.1)
        return made


def scaled() -> nn.Module:
    return nn.Sequential(*(Scaled() for _ in range(4)))


def rows(size: int) -> Batch:
    return Batch((torch.randn(size, 8),), {}, torch.randn(size, 8))


Result = tuple[list[Tensor], dict[str, Tensor]]  # losses and gradients


def run(pipe: zbcompile.Pipeline, executable: Executable, batch: Batch, recorder: Looking | None = None) -> Result:
    """A step from gradients that are not there."""
    runs = pipe._runs
    for parameter in pipe.parameters():
        parameter.grad = None
    tensors = runs.split(batch.args, batch.kwargs, batch.target).tensors
    given = StepInput(tensors, index=0, seed=0, reduction="mean", recorder=recorder)
    found = runs.engine.run(executable, given, runs.compiled.bound.parameters)
    return found.losses.read(), {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("problem", "schedule", "exact"),
    [
        ("mlp", "1f1b", False),
        ("mlp", "dualpipe-v", True),
        ("small-tied", "zb-v", False),
        ("small-tied", "zb-h1", True),
        ("scaled", "zb-v", False),
        pytest.param("llama", "zb-v", False, marks=[pytest.mark.slow, pytest.mark.beyond_sample]),
        pytest.param("mixtral", "dualpipe-v", False, marks=[pytest.mark.slow, pytest.mark.beyond_sample]),
    ],
)
def test_steps_write_the_same_addresses(problem: str, schedule: str, exact: bool) -> None:
    """With other data. They compute the bits of steps without places, and nothing that waits between actions was
    allocated in the step."""
    chosen = Problem(scaled, F.mse_loss, rows) if problem == "scaled" else problem_of(problem)
    options = {"ranks": 2, "microbatches": 4, "loss": chosen.loss, "exact": exact, "vocab": "off"}
    model = chosen.model()
    pipe = zbcompile.pipeline(model, schedule=schedule, **options)
    logs, homes = [], []
    placed = None
    for batch in chosen.batches(3, 8):
        runs = pipe._runs
        plain = runs.program_for(runs.split(batch.args, batch.kwargs, batch.target))
        placed = placed or with_places(plain, torch.device("cpu"), {})
        buffers = [each.clone() for each in model.buffers()]
        losses, gradients = run(pipe, plain, batch)
        for each, before in zip(model.buffers(), buffers, strict=True):
            each.copy_(before)
        written = Written(list(placed.memory.blocks.values()))
        looking = Looking(written, placed)
        with written:
            its_losses, its_gradients = run(pipe, placed, batch, looking)
        assert all(map(same_bits, losses, its_losses))
        assert gradients.keys() == its_gradients.keys()
        assert all(same_bits(gradient, its_gradients[name]) for name, gradient in gradients.items())
        logs.append(written.log)
        homes.append([p.grad.data_ptr() for p in pipe.parameters()])
    assert homes[1] == homes[2] == homes[0]
    assert len(logs[1]) > 0
    assert logs[1] == logs[2]
    assert looking.actions >= sum(len(plan.instructions) for plan in placed.plans)


def staying_in(placed: Executable) -> set[int]:
    """The storages that a step may leave values in: blocks, inputs, and what the model holds."""
    memory = placed.memory
    inputs = [value for each in memory.inputs for value in each.values()]
    resident = [value for stage in placed.first.stages.values() for value in stage.resident.values()]
    return {value.untyped_storage().data_ptr() for value in (*memory.blocks.values(), *inputs, *resident)}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Zeros of both signs told apart."""
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_block_is_as_large_as_predicted(schedule: str) -> None:
    """Within 2 %, and what is alive at one moment is what the prediction says, up to alignment."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (1, 65))
    model = GPT(layers=4, width=64, length=64, tied=True)
    example = zbcompile.Example(model, (tokens[:, :-1],), loss=next_byte_loss, target=tokens[:, 1:])
    program = compile_example(example, build(schedule, ranks=2, microbatches=6), Choices()).program
    plans = [planned(program, rank) for rank in range(2)]
    predicted = max(memory.peak for memory in rank_memories(program, predicted_costs(program), {}))
    assert max(plan.least for plan in plans) <= predicted * 1.02
    assert max(plan.size for plan in plans) <= predicted * 1.02


def planned(program: Program, rank: int) -> MemoryPlan:
    def stage_of(action: Action) -> Any:
        stage = program.stages[action.stage]
        return SimpleNamespace(program=stage, device=torch.device("cpu"), generator_arrives=False)

    instructions = instructions_of(program, rank, stage_of)
    return plan_memory(instructions, lambda action: program.stages[action.stage], program.shared)
