"""Every schedule: right at every size, within its promised memory, and what its source says of it."""

import inspect
import random
import re
from collections.abc import Callable

import pytest

from zbcompile.schedules import Costs, ScheduleError, admits, build, check, lower, names, simulate
from zbcompile.schedules.generators.registry import FAMILIES, Family
from zbcompile.schedules.ir.actions import B, W, flatten
from zbcompile.schedules.ir.schedule import parse_order

# What `build` promises to hold at most, in activations of one stage, when every microbatch takes
# the same everywhere.
PROMISED_PEAK: dict[str, Callable[[int, int], int]] = {
    "gpipe": lambda p, m: m,
    "1f1b": lambda p, m: min(m, p),
    "1f1b-overlap": lambda p, m: min(m, 2 * p),
    "interleaved-1f1b": lambda p, m: min(2 * m, _group(p, m) + 2 * p - 1),
    "interleaved-1f1b-overlap": lambda p, m: min(2 * m, _group(p, m) + 2 * p),
    "looped-bfs": lambda p, m: 2 * m,
    "zb-h1": lambda p, m: min(m, p),
    "zb-h1-lazy": lambda p, m: min(m, p),
    "zb-h2": lambda p, m: min(m, 2 * p - 1),
    "zb-1p": lambda p, m: min(m, p),
    "zb-2p": lambda p, m: min(m, 2 * p),
    "interleaved-zb": lambda p, m: min(2 * m, _group(p, m) + p),
    "zb-v": lambda p, m: min(2 * m, 2 * p),
    "v-half": lambda p, m: min(2 * m, 2 * ((p + 2) // 2)),
    "v-min": lambda p, m: min(2 * m, 2 * ((p + 4) // 3)),
    "dualpipe": lambda p, m: p + 1,
    "dualpipe-v": lambda p, m: 2 * p + 1,
    "auto": lambda p, m: 2 * m,  # without a limit it promises none
}


def _group(ranks: int, microbatches: int) -> int:
    return microbatches // max(1, microbatches // ranks)


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize("name", names())
def test_every_size_is_right_and_keeps_its_promise(name: str, random_costs) -> None:
    """Ranks 1..6, two numbers of microbatches up to 24 for each; a third has random costs too. A
    search takes long, and gets two numbers of ranks."""
    any_, built = random.Random(name), 0
    for ranks in (2, 3) if name == "auto" else range(1, 7):
        admitted = [m for m in range(1, 25) if admits(name, ranks, m)]
        for microbatches in any_.sample(admitted, min(2, len(admitted))):
            schedule = build(name, ranks, microbatches)
            built += 1
            check(schedule, memory_limit=PROMISED_PEAK[name](ranks, microbatches))
            if built % 3:
                continue
            costs = random_costs(any_, schedule.stages)
            chosen = build(name, ranks, microbatches, costs=costs)
            lowered, t = lower(chosen, costs), simulate(chosen, costs)
            check(lowered, costs)
            assert t.work <= t.cost <= t.makespan == simulate(lowered, costs).makespan
            assert 0 <= t.cost_bubble <= t.bubble < 1
    assert built >= 3


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_docstring_picture_is_the_schedule(family: Family) -> None:
    """The picture in every generator's docstring, read back, is what it generates."""
    doc = inspect.getdoc(family.generate) or ""
    counts = re.search(r"On\s+(\d+)\s+ranks,(?:\s+(\d+)\s+chunks,)?\s+(\d+)\s+microbatches", doc)
    assert counts, "a picture is announced by 'On R ranks, M microbatches'"
    ranks, microbatches = int(counts[1]), int(counts[3])
    blocks = doc.split("::\n\n", 1)[1].split("\n\n")
    bands = [block.splitlines() for block in blocks if block.startswith("    ")]
    orders = tuple(sum((parse_order(band[rank]) for band in bands), ()) for rank in range(ranks))
    assert orders == build(family.name, ranks, microbatches).orders


def test_zb_h1_lazy_declares_its_own_weight_order_and_exact_that_of_1f1b() -> None:
    """The sail-sg and DeepSpeed runtimes do the same: on the last of 4 ranks microbatches
    4,5,6,7,1,2,3,8 (1-based) of 8. Rank 0 never splits."""
    lazy, exact = (build("zb-h1-lazy", 4, 8, exact=e) for e in (False, True))
    assert lazy.weight_order(3) == (3, 4, 5, 6, 0, 1, 2, 7)
    assert not any(action.op in (B, W) for action in flatten(lazy.orders[0]))
    check(exact, weight_order="microbatch")
    assert {exact.weight_order(stage) for stage in range(4)} == {tuple(range(8))}
    assert len({simulate(each).makespan for each in (build("zb-h1", 4, 8), lazy, exact)}) == 1


def test_automatic_uses_the_costs_of_every_stage() -> None:
    """F and B of the last stage 1.4 times as heavy, a hop 0.1 of F, W keeping half: 9% shorter. Fed
    with median costs, as the published runtime does, the heuristic finds no better than ZB-H1."""
    heavy = (20, 20, 20, 28)
    costs = Costs(heavy, heavy, (20,) * 4, residue=(0.5,) * 4, comm=2)
    median = Costs.uniform(4, 20, 20, 20, comm=2, residue=0.5)
    fed_stages = build("zb-1p", 4, 8, costs=costs)
    assert simulate(build("zb-h1", 4, 8), costs).cost == 680
    assert simulate(build("zb-1p", 4, 8, costs=median), costs).cost == 680
    assert simulate(fed_stages, costs).cost == 620
    check(fed_stages, costs, memory_limit=4)


@pytest.mark.parametrize(("name", "handcrafted"), [("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")])
def test_automatic_is_never_longer_than_the_handcrafted_order(
    name: str, handcrafted: str, random_costs
) -> None:
    """ZB-H1 always fits into zb-1p's memory, ZB-H2 into zb-2p's."""
    generator = random.Random(name)
    for ranks, microbatches in ((1, 2), (2, 5), (3, 12), (4, 1), (4, 12), (6, 12)):
        costs = random_costs(generator, ranks)
        reference = simulate(build(handcrafted, ranks, microbatches), costs)
        schedule = build(name, ranks, microbatches, costs=costs)
        assert simulate(schedule, costs).cost <= reference.cost


def test_automatic_obeys_a_memory_limit() -> None:
    costs = Costs.uniform(4, residue=0.4)
    spans = []
    for limit in (1, 2, 4, 8):
        schedule = build("zb-2p", 4, 12, costs=costs, memory_limit=limit)
        check(schedule, costs, memory_limit=limit)
        spans.append(simulate(schedule, costs).cost)
    assert spans == sorted(spans, reverse=True)
    with pytest.raises(ScheduleError, match=r"at its peak, but memory_limit is 0\.5; raise"):
        build("zb-2p", 4, 12, costs=costs, memory_limit=0.5)
