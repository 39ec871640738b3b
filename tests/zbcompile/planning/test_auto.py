"""`schedule="auto"`: the layout and the order are searched, all ranks agree, and the bits are eager's as ever."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zbcompile
from tests.support.oracle import PROBLEMS, Batch, eager_step
from tests.support.pool import Pool
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import lay_out_step
from zbcompile.compiler.cut_planning import places_of
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import CaptureError, PartitionError
from zbcompile.passes.machine.hardware import Connection
from zbcompile.planning import layout_trials, planner
from zbcompile.planning.planner import PricedStep, decide
from zbcompile.program.choice import Choice
from zbcompile.schedules import ScheduleError, build
from zbcompile.schedules.ir.placement import Placement

PROBLEM = PROBLEMS["gpt"]
ROWS = 8


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "SEARCH_SECONDS", 0.1)


def auto(**options: object) -> tuple[zbcompile.Pipeline, Batch]:
    (batch,) = PROBLEM.batches(1, ROWS)
    options = {"ranks": 2, "exact": True, **options}
    return zbcompile.pipeline(PROBLEM.model(), schedule="auto", loss=PROBLEM.loss, **options), batch  # type: ignore[call-overload]


def decided(counts: tuple[int, ...] = (), **options: Any) -> Choice:
    (batch,) = PROBLEM.batches(1, 2)
    model = PROBLEM.model()
    example = zbcompile.Example(model, batch.args, loss=PROBLEM.loss, target=batch.target)
    laid_out = lay_out_step(model, one_microbatch(example), PROBLEM.loss)
    return decide(laid_out, build("zb-v", 2, 8), Choices(**options), counts, None, 0.1)[0]


@pytest.mark.slow
def test_bits_and_plan(tmp_path: Path) -> None:
    pipe, batch = auto()
    loss = pipe.step(*batch.args, target=batch.target)
    model, count = PROBLEM.model(), pipe.program.schedule.microbatches
    assert ROWS % count == 0
    assert torch.equal(loss, eager_step(model, PROBLEM.loss, batch, count, 0))
    expected = dict(model.named_parameters())
    assert all(torch.equal(p.grad, expected[name].grad) for name, p in pipe.named_parameters())  # type: ignore[arg-type]
    plan = pipe.program.plan
    assert plan is not None
    assert plan.seconds >= plan.bound > 0
    assert str(plan.layout) in str(plan)
    pipe.program.save(tmp_path / "program")
    assert zbcompile.load(tmp_path / "program").program.plan == plan


@pytest.mark.slow
def test_a_choice_is_explained_in_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing else is advised, though one stage is far heavier than the other: the search has weighed that."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)], nn.Linear(16, 512))
    options: dict[str, Any] = {"ranks": 2, "microbatches": 2, "exact": True}
    pipe = zbcompile.pipeline(model, schedule="auto", loss=nn.functional.mse_loss, **options)
    pipe.step(torch.randn(8, 16), target=torch.randn(8, 512))
    assert pipe.program.cuts.overweight
    assert capsys.readouterr().out == f"zbcompile: {pipe.program.plan}\n"
    assert len(str(pipe.program.plan).splitlines()) <= 3


@pytest.mark.slow
def test_another_shape_keeps_the_layout() -> None:
    pipe, batch = auto(microbatches=4)
    pipe.step(*batch.args, target=batch.target)
    (more,) = PROBLEM.batches(1, 2 * ROWS)
    loss = pipe.step(*more.args, target=more.target)
    assert torch.equal(loss, eager_step(PROBLEM.model(), PROBLEM.loss, more, 4, 1))


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("barriers", [1, 2])
def test_a_sharded_output_layer_is_searched_with_its_barriers(barriers: int) -> None:
    pipe, batch = auto(microbatches=4, vocab=barriers, exact=False)
    loss = pipe.step(*batch.args, target=batch.target)
    assert pipe.program.vocabulary is not None
    assert pipe.program.vocabulary.barriers == barriers
    assert torch.allclose(loss, eager_step(PROBLEM.model(), PROBLEM.loss, batch, 4, 0), rtol=2e-6)


class SlowOnOneRow(nn.Module):
    """With one row a microbatch takes other operations, which a search for more rows must not take for the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            for _ in range(40):
                x = x.sin()
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.slow
def test_the_cuts_belong_to_the_number_of_microbatches_that_was_chosen() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"schedule": "auto", "ranks": 2, "exact": True}
    pipe = zbcompile.pipeline(SlowOnOneRow(), loss=nn.functional.mse_loss, **options)
    torch.manual_seed(0)
    eager, x = SlowOnOneRow(), torch.randn(8, 16)
    pipe.model.load_state_dict(eager.state_dict())
    loss, count = pipe.step(x, target=x), pipe.program.schedule.microbatches
    assert count < 8  # eight would be slower, and were captured first
    assert torch.equal(loss, eager_step(eager, nn.functional.mse_loss, Batch((x,), {}, x), count, 0))
    assert sum(len(stage.trained) for stage in pipe.program.stages) == 12


class NeedsRows(nn.Module):
    """As a batch norm does, it refuses a microbatch of few rows; it takes long enough for small ones to be best."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.least = least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < self.least:
            raise ValueError("too few rows")
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


FREE = Connection(0.0, 1e15)
SLOW = zbcompile.Hardware("slow", {"float32": 1e5}, 1e12, node_ranks=2, within=FREE, between=FREE)


def with_few_rows(least: int, rows: int) -> int:
    """The number of microbatches that is chosen; the bits are eager's."""
    torch.manual_seed(0)
    eager, model, x = NeedsRows(least), NeedsRows(least), torch.randn(rows, 16)
    model.load_state_dict(eager.state_dict())
    options: dict[str, Any] = {"schedule": "auto", "ranks": 2, "exact": True}
    pipe = zbcompile.pipeline(model, loss=nn.functional.mse_loss, chunks=1, hardware=SLOW, **options)
    loss, count = pipe.step(x, target=x), pipe.program.schedule.microbatches
    assert torch.equal(loss, eager_step(eager, nn.functional.mse_loss, Batch((x,), {}, x), count, 0))
    assert pipe._watch.known is None  # an error of a capture that was refused holds all that was captured
    return count


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_microbatches_with_too_few_rows_for_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    refused = "auto does not split this batch into {} microbatches, or more: torch.export cannot capture NeedsRows"
    assert with_few_rows(1, rows=16) == 16
    assert "does not split" not in capsys.readouterr().out
    assert with_few_rows(2, rows=16) == 8
    assert refused.format(16) in capsys.readouterr().out
    assert with_few_rows(2, rows=8) == 4  # the usual number is 8
    assert refused.format(8) in capsys.readouterr().out
    assert with_few_rows(8, rows=16) == 2
    assert refused.format(4) in capsys.readouterr().out  # it began with 8
    with pytest.raises(CaptureError, match=r"cannot capture NeedsRows.*too few rows"):
        with_few_rows(16, rows=16)
    assert "does not split" not in capsys.readouterr().out


@pytest.mark.slow
def test_all_ranks_leave_out_the_same(pool: Pool) -> None:
    assert pool.run(with_few_rows, 2, 8) == [4, 4]


class Noting(nn.Module):
    """Writes buffers, draws random numbers, and has tied parameters, none of which a trial may disturb."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))
        self.last = nn.Linear(64, 16)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.drop(self.norm(self.first(x)))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def tried_on_each_rank() -> tuple[Choice, list[str]]:
    """Steps on trial leave no trace: the first step has eager's bits."""
    model = Noting()
    pipe = zbcompile.pipeline(model, schedule="auto", loss=nn.functional.mse_loss, exact=True)
    batch = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    with mock.patch.object(layout_trials, "CLOSE", 10):  # whatever the messages take, there is more than one to try
        pipe.compile(batch, target=batch)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    loss = pipe.step(batch, target=batch)
    eager, count = Noting(), pipe.program.schedule.microbatches
    expected = eager_step(eager, nn.functional.mse_loss, Batch((batch,), {}, batch), count, 0)
    assert torch.equal(loss, expected)
    grads = dict(eager.named_parameters())
    assert all(torch.equal(p.grad, grads[name].grad) for name, p in pipe.named_parameters())  # type: ignore[arg-type]
    assert pipe.program.plan is not None
    return pipe.program.plan, list(map(str, pipe.program.schedule.orders))


@pytest.mark.slow
def test_all_ranks_try_the_same_and_agree(pool: Pool) -> None:
    one, other = pool.run(tried_on_each_rank, ranks=2)
    assert one == other
    plan, _ = one
    assert len(plan.tried) > 1
    assert plan.tried[0][0] == plan.way
    assert list(plan.tried[1:]) == sorted(plan.tried[1:], key=lambda each: each[1])
    assert "tried on the ranks, which decided: step " in str(plan)
    assert all(shortest <= middle <= longest for _, middle, shortest, longest in plan.tried)


def without_an_order_for(fails: int, model: nn.Module, **options: Any) -> str:
    """On the first rank, which searches, no order fits the first finalists."""
    search, asked = layout_trials.order_by_graphs, []

    def fail(*task: Any) -> Any:
        asked.append(task)
        if len(asked) <= fails:
            raise ScheduleError("no order fits")
        return search(*task)

    pipe = zbcompile.pipeline(model, schedule="auto", loss=nn.functional.mse_loss, **options)
    batch = torch.randn(16, 16)
    with mock.patch.object(layout_trials, "order_by_graphs", fail):
        try:
            pipe.compile(batch, target=batch)
        except ScheduleError as error:
            return str(error)
    return str(pipe.program.plan)


def on_each_rank_without_an_order_for(fails: int) -> str:
    return without_an_order_for(fails, Noting())


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_a_finalist_without_an_order_is_left_out_on_every_rank(pool: Pool) -> None:
    for fails, says in ((100, "no order fits"), (1, "tried on the ranks, which decided")):
        found = pool.run(on_each_rank_without_an_order_for, fails, ranks=2)
        assert found[0] == found[1]
        assert says in found[0]


@pytest.mark.slow
def test_the_next_layout_if_no_order_fits_the_graphs() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    options: dict[str, Any] = {"ranks": 2, "microbatches": 4}
    best, next_best = (without_an_order_for(fails, model, **options) for fails in (0, 1))
    assert best.split(";")[0] != next_best.split(";")[0]
    assert without_an_order_for(100, model, **options) == "no order fits"


@pytest.mark.slow
def test_a_limit_of_memory_is_kept_by_recomputing() -> None:
    free = decided()
    limit = max(free.resident) + 0.5 * max(p - r for p, r in zip(free.peak, free.resident, strict=True))
    assert max(free.peak) > limit
    tight = decided(memory=limit)
    assert max(tight.peak) <= limit
    with pytest.raises(PartitionError, match=r"no layout fits: .*rank \d.*more than"):
        decided(memory=min(free.resident) / 2)


@pytest.mark.slow
def test_what_is_asked_for_is_kept() -> None:
    named = decided(balance=("blocks.1",))
    assert (named.order.stages, named.order.placement.kind) == (2, "linear")
    with pytest.raises(PartitionError, match=r"names the cuts of 3 stages.*2 ranks; expected 1 or 3 or 7 cuts"):
        decided(balance=("blocks.0", "blocks.1"))
    assert decided(recompute="off", memory=1e9).layout.recompute == "off"
    assert {choice.layout.microbatches for choice in (decided(), decided(counts=(8,)))} == {8}


@pytest.mark.slow
def test_a_sharded_output_layer_counts_in_the_memory() -> None:
    """What the ranks hold together, sharded or not, is the model."""
    (batch,) = PROBLEM.batches(1, 2)
    example = zbcompile.Example(PROBLEM.model(), batch.args, loss=PROBLEM.loss, target=batch.target)
    held = []
    for choices in (Choices(), Choices(vocab=1)):
        laid_out = lay_out_step(example.model, one_microbatch(example), PROBLEM.loss, choices, build("zb-v", 2, 8))
        assert (laid_out.sharding is None) == (choices.vocab == "off")
        costs = PricedStep(laid_out, choices).costs(2)[choices.vocab]
        edges = places_of(costs.line)[::8][1:4]
        assert bool(costs.shard.scan) == (choices.vocab == 1)
        held.append(sum(costs.resident(edges, Placement.parse("v", 2))))
    assert held[1] == pytest.approx(held[0], rel=0.02)
