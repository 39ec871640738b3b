"""The least that a step takes, beside the steps that are found."""

from collections.abc import Sequence
from itertools import combinations
from random import Random

import pytest

from targets import gpt
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import lay_out_step
from zbcompile.compiler.prices import LinePrices
from zbcompile.passes.compile_options import Choices, Policy
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.machine.hardware import Connection
from zbcompile.planning.layouts import LayoutSearch
from zbcompile.planning.least_step import LeastStep, Stages
from zbcompile.program.choice import Layout
from zbcompile.schedules import ScheduleError, build

RANKS, MICROBATCHES = 3, 5


@pytest.fixture(scope="module")
def prices() -> LinePrices:
    example, choices = gpt(), Choices()
    laid_out = lay_out_step(example.model, one_microbatch(example), example.loss, choices)
    return LinePrices(laid_out.canonical, laid_out.line, choices, link=Connection(1e-5, 1e9))


def limit(prices: LinePrices, share: float) -> float:
    """Bytes that any rank may hold: with equal cuts this share of what 1F1B needs beyond what is always held."""
    order, edges = build("1f1b", RANKS, MICROBATCHES), prices.blocks[2:6:2]
    always, most = prices.held_by_any_order(order.placement, edges), prices.most_held(order, edges)
    return max(always) + share * (max(most) - max(always))


def layout_of(stages: Stages | Sequence[tuple[int, Policy]]) -> Layout:
    begins, policies = zip(*((part[0], part[1]) for part in stages), strict=True)
    return Layout("linear", RANKS, MICROBATCHES, begins[1:], policies)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.6, 1.5])
def test_no_step_that_is_found_is_shorter(prices: LinePrices, share: float) -> None:
    memory = limit(prices, share)
    search = LayoutSearch({"off": prices}, RANKS, MICROBATCHES, Choices(memory=memory))
    least, stages = LeastStep(prices, RANKS, MICROBATCHES, memory, prices.blocks[1:]).least(prices.levels) or (0.0, ())
    random, found = Random(0), [search.lay_out(layout_of(stages)).seconds]
    for edges in combinations(prices.blocks[1:], RANKS - 1):
        policies = [random.choice(prices.levels) for _ in range(RANKS)]
        try:
            found.append(search.lay_out(layout_of([*zip((0, *edges), policies, strict=True)])).seconds)
        except (PartitionError, ScheduleError):
            continue
    assert len(found) > 1
    assert 0 < least <= min(found) <= 2 * least


def test_with_little_memory_first_ranks_recompute(prices: LinePrices) -> None:
    memory = limit(prices, 0.6)
    found = LeastStep(prices, RANKS, MICROBATCHES, memory, prices.blocks[1:]).least(prices.levels)
    assert found is not None
    kept = [prices.levels.index(part.policy) for part in found[1]]
    assert kept[0] < kept[-1] == len(prices.levels) - 1
    assert all(part.many > 0 for part in found[1])


def test_waiting_takes_memory_or_time(prices: LinePrices) -> None:
    step = LeastStep(prices, RANKS, MICROBATCHES, limit(prices, 0.6), prices.blocks[1:])
    found = [step.least(prices.levels, slack) for slack in (0, 1, 2)]
    seconds = [each[0] for each in found if each is not None]
    assert len(seconds) == 3
    assert seconds == sorted(seconds)


def test_nothing_fits_into_no_memory(prices: LinePrices) -> None:
    assert LeastStep(prices, RANKS, MICROBATCHES, 1.0, prices.blocks[1:]).least(prices.levels) is None
    assert LeastStep(prices, RANKS, MICROBATCHES, 1e12, ()).least(prices.levels) is None
