"""Executing a schedule, besides `test_combinations.py`: late messages, the order of
weight gradients, many ranks, chunks, and merged pairs."""

import itertools
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.support.oracle import PROBLEMS, eager_step_in_order
from tests.support.ordered import in_turn
from tests.support.pool import Pool
from tests.support.training import (
    ROWS,
    Case,
    Trained,
    assert_bitwise,
    assert_same_tensors,
    gradients_of,
    join,
    pipeline_of,
    quickly,
    reference,
    train,
)
from zbcompile.distributed.ranks import GroupRanks
from zbcompile.distributed.transport import OrderedLinks, PointToPoint, Tensors
from zbcompile.env import ORDERED
from zbcompile.program.edges import Message
from zbcompile.schedules import Pair, ScheduleError, build, names, smallest_microbatches

LAZY = "zb-h1-lazy"
# over messages these run on 2 and on 4 ranks, the others on one of the two
REGULAR = ("1f1b", "zb-v", "dualpipe-v")
MODELS = ("small-tied", "skips")


def admitted(name: str, ranks: int) -> bool:
    """Returns True if the schedule exists for so many ranks, with stages enough for both models."""
    try:
        schedule = build(name, ranks, smallest_microbatches(name, ranks, at_least=2 * ranks))
    except ScheduleError:
        return False
    return schedule.stages <= 8


def case_of(name: str, ranks: int, model: int) -> Case:
    count = smallest_microbatches(name, ranks, at_least=2 * ranks)
    problem = MODELS[model % 2]
    stages = build(name, ranks, count).stages
    return Case(
        "gpt-tied" if problem == "small-tied" and stages > 4 else problem,
        name,
        ranks,
        count,
        steps=1,
    )


IN_PROCESSES = [
    case_of(name, ranks, i // 2 + j)
    for i, name in enumerate(names())
    for j, ranks in enumerate((2, 4))
    if admitted(name, ranks) and (i % 2 == j or name in REGULAR)
]
DELAYED = [
    case
    for case in IN_PROCESSES
    if case.schedule in ("1f1b", "zb-v", "dualpipe-v", "dualpipe", "interleaved-zb")
]


def assert_declared(ours: Trained, case: Case) -> None:
    """Eager's bits; for the lazy schedule in its own order of weight gradients."""
    if case.schedule == LAZY and case.ranks > 1:
        assert_same_tensors(ours.losses, reference(case).losses, "loss of step")
        assert_same_tensors(ours.gradients[0], folded(case).gradients[0], "gradient of")
    else:
        assert_bitwise(ours, reference(case))


def test_the_lazy_schedule_has_the_sums_of_its_order() -> None:
    case = Case("small-tied", LAZY, 2, 4, steps=1)
    assert_declared(quickly(case), case)


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize(
    ("name", "ranks", "chunks"),
    [("interleaved-1f1b", 2, 3), ("interleaved-zb", 2, 4), ("interleaved-1f1b-overlap", 1, 5)],
)
def test_any_number_of_chunks(name: str, ranks: int, chunks: int) -> None:
    case = Case("mlp", name, ranks, 4, steps=1)
    assert_bitwise(train(pipeline_of(case, chunks=chunks), case), reference(case))


def folded(case: Case) -> Trained:
    """Eager's gradients of microbatches added in the order of W of each stage; those that B computes
    and those of tied parameters in the order of microbatches."""
    program = program_of(case)
    in_w = {
        slot.name
        for stage in program.stages
        for slot in stage.pieces["W"].outputs
        if slot.role == "weight_gradient"
    }
    problem = PROBLEMS[case.problem]
    model, batch = problem.model(), problem.batches(1, case.microbatches * ROWS)[0]
    orders = {
        name: (
            program.schedule.weight_order(program.homes[name][0])
            if name in in_w - program.shared
            else range(case.microbatches)
        )
        for name, _ in model.named_parameters()
    }
    loss = eager_step_in_order(model, problem.loss, batch, 0, orders)
    return Trained([loss], [gradients_of(model)], {})


def program_of(case: Case):
    pipe = pipeline_of(case)
    batch = PROBLEMS[case.problem].batches(1, case.microbatches * ROWS)[0]
    return pipe.compile(*batch.args, target=batch.target).program


@dataclass
class Late(PointToPoint):
    """Real messages, each sent a little late; ranks with odd numbers are slow. Where the channels
    are ordered, each is a stream, as with NCCL."""

    def __post_init__(self) -> None:
        if isinstance(self.channels, OrderedLinks):
            self.channels = in_turn(self.channels)

    def send(self, message: Message, tensors: Tensors, peer: int) -> None:
        time.sleep(random.random() ** 4 * 0.01)
        super().send(message, tensors, peer)

    def wait(self, message: Message) -> None:
        time.sleep(random.random() ** 4 * 0.01 * (1 + dist.get_rank() % 2))
        super().wait(message)


def delayed(case: Case, ordered: bool) -> Trained:
    original = GroupRanks.transport
    GroupRanks.transport = lambda self, *arguments: Late(**vars(original(self, *arguments)))  # type: ignore[method-assign]
    try:
        with mock.patch.dict(os.environ, {ORDERED.name: str(int(ordered))}):
            return quickly(case)
    finally:
        GroupRanks.transport = original  # type: ignore[method-assign]


def delays() -> Iterator[Any]:
    """One schedule by tags, another in order; the rest beyond the sample."""
    first = [case for case in DELAYED if case.ranks == 2]
    for case, ordered in itertools.product(DELAYED, (False, True)):
        sampled = case in first[:2] and first.index(case) % 2 == ordered
        marks = [pytest.mark.slow] if sampled else [pytest.mark.slow, pytest.mark.beyond_sample]
        yield pytest.param(
            case, ordered, id=f"{case}-{'in order' if ordered else 'by tag'}", marks=marks
        )


@pytest.mark.parametrize(("case", "ordered"), list(delays()))
def test_late_messages_and_slow_ranks_change_no_bit(case: Case, ordered: bool, pool: Pool) -> None:
    """Also where messages have no tags, and a channel ends one operation before it begins
    the next."""
    assert_declared(join(pool.run(delayed, case, ordered, ranks=case.ranks)), case)


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize("name", ["dualpipe-v", "1f1b-overlap", "dualpipe"])
def test_pairs_run_as_one_graph(name: str) -> None:
    """Each kind of pair is one merged graph, called once per pair; recorded spans still name both
    halves."""
    case = Case("mlp", name, 2, 8, steps=1)
    pipe = pipeline_of(case)
    batch = PROBLEMS["mlp"].batches(1, case.microbatches * ROWS)[0]
    pipe.compile(*batch.args, target=batch.target)
    pairs = [
        step for order in pipe.program.schedule.orders for step in order if isinstance(step, Pair)
    ]
    calls: list[str] = []
    for plan in list(pipe._compiled.steps.plans.values())[-1].ordered()[1]:
        for kind, run in plan.merged.items():
            plan.merged[kind] = lambda values, run=run: (calls.append(name), run(values))[1]  # type: ignore[index]
    pipe.record = True
    pipe.step(*batch.args, target=batch.target)
    assert len(calls) == len(pairs) > 0
    spans = {span.action for spans in pipe.last_step.spans.values() for span in spans}
    assert {str(action) for pair in pairs for action in pair} <= spans
