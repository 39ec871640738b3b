"""Every schedule at every small size: right, within its promised memory, and what its source says
of it."""

import inspect
import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from zbcompile.schedules import Costs, Schedule, ScheduleError, build, check, names, simulate
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


SIZES = (*range(1, 13), 14, 16, 18, 20, 24)


def _group(ranks: int, microbatches: int) -> int:
    return microbatches // max(1, microbatches // ranks)


@pytest.mark.mostly_slow(every=8)
@pytest.mark.parametrize("name", names())
def test_every_size_is_right_and_keeps_its_promise(name: str, random_costs) -> None:
    """Ranks 1..8, microbatches up to 24, not all of the larger numbers: memory stays within the
    promise, and `check` passes, for a third under random costs too. A search takes long, and gets a
    quarter of the sizes.
    """
    generator = random.Random(name)
    built = 0
    for ranks in range(1, 9):
        for microbatches in range(1 + ranks % 4, 25, 4) if name == "auto" else SIZES:
            schedule = _build_or_none(name, ranks, microbatches)
            if schedule is None:
                continue
            built += 1
            check(schedule, memory_limit=PROMISED_PEAK[name](ranks, microbatches))
            if built % 3 == 0:
                costs = random_costs(generator, schedule.stages)
                check(build(name, ranks, microbatches, costs=costs), costs)
    assert built >= 25


def _build_or_none(name: str, ranks: int, microbatches: int) -> Schedule | None:
    try:
        return build(name, ranks, microbatches)
    except ScheduleError as error:
        if re.search("it admits", str(error)):
            return None
        raise


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-1f1b-overlap", "interleaved-zb"])
def test_any_number_of_chunks(name: str) -> None:
    for chunks, ranks in ((1, 5), (3, 2), (4, 3), (5, 8)):
        for microbatches in (1, ranks, 3 * ranks):
            check(build(name, ranks, microbatches, chunks=chunks))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_docstring_picture_is_the_schedule(family: Family) -> None:
    """The picture in every generator's docstring, read back, is what it generates."""
    doc = inspect.getdoc(family.generate) or ""
    counts = re.search(r"On\s+(\d+)\s+ranks,(?:\s+(\d+)\s+chunks,)?\s+(\d+)\s+microbatches", doc)
    assert counts, "a picture is announced by 'On R ranks, M microbatches'"
    ranks, microbatches = int(counts[1]), int(counts[3])
    bands = [
        band.splitlines()
        for band in doc.split("::\n\n", 1)[1].split("\n\n")
        if band.startswith("    ")
    ]
    orders = tuple(sum((parse_order(band[rank]) for band in bands), ()) for rank in range(ranks))
    assert orders == build(family.name, ranks, microbatches).orders


def test_zb_h1_lazy_declares_its_own_weight_order() -> None:
    """The sail-sg and DeepSpeed runtimes do the same: on the last of 4 ranks microbatches 4,5,6,7,1,2,3,8
    (1-based) of 8."""
    assert build("zb-h1-lazy", ranks=4, microbatches=8).weight_order(3) == (3, 4, 5, 6, 0, 1, 2, 7)
    with pytest.raises(ScheduleError):
        check(build("zb-h1-lazy", ranks=4, microbatches=8), weight_order="microbatch")


def test_zb_h1_lazy_exact_accumulates_as_1f1b() -> None:
    for ranks, microbatches in itertools.product(range(1, 9), (1, 2, 5, 8, 16, 23)):
        exact = build("zb-h1-lazy", ranks, microbatches, exact=True)
        check(exact, weight_order="microbatch")
        for stage in range(ranks):
            assert exact.weight_order(stage) == tuple(range(microbatches))


def test_zb_h1_lazy_is_as_short_and_never_splits_on_rank_0() -> None:
    for ranks, microbatches in ((1, 1), (2, 2), (4, 8), (8, 24)):
        lazy, exact = (build("zb-h1-lazy", ranks, microbatches, exact=e) for e in (False, True))
        schedules = (build("zb-h1", ranks, microbatches), lazy, exact)
        assert len({simulate(schedule).makespan for schedule in schedules}) == 1
        assert not any(action.op in (B, W) for action in flatten(lazy.orders[0]))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_few_microbatches_of_zb_v_beat_deletion(ranks: int) -> None:
    """m < 2p-1: never longer than the published rule in cost or makespan, at m = p 7% shorter or
    more."""
    for microbatches in range(1, 2 * ranks - 1):
        ours = build("zb-v", ranks, microbatches)
        handcrafted = build("zb-v", ranks, 2 * ranks - 1).orders
        deleted = tuple(
            tuple(a for a in flatten(order) if a.microbatch < microbatches) for order in handcrafted
        )
        theirs = Schedule("deleted", ours.placement, microbatches, deleted)
        costs = Costs.uniform(ours.stages)
        ours_timeline, theirs_timeline = simulate(ours, costs), simulate(theirs, costs)
        assert ours_timeline.cost <= theirs_timeline.cost
        assert ours_timeline.makespan <= theirs_timeline.makespan
        if microbatches == ranks:
            assert ours_timeline.cost <= 0.93 * theirs_timeline.cost


# what the schedulers of sail-sg's runtime take on 4 x 8, 8 x 8 and 8 x 24, with their own profiled
# passes
AUTHORS = {
    ("zb-v", (18.522, 18.086, 9.337, 0.601, 0.37)): (404.358, 454.062, 1188.542),
    ("zb-v", (29.718, 29.444, 19.927, 0.527, 0.43)): (685.194, 793.402, 2020.594),
    ("zb-v", (11.347, 11.248, 8.132, 0.377, 0.44)): (268.491, 311.401, 790.357),
    ("v-half", (18.522, 18.086, 9.337, 0.601, 0.37)): (449.832, 608.422, 1328.772),
    ("v-half", (29.718, 29.444, 19.927, 0.527, 0.43)): (742.942, 970.733, 2219.136),
    ("v-half", (11.347, 11.248, 8.132, 0.377, 0.44)): (290.466, 379.614, 866.114),
    ("v-half", (1, 1, 2, 0.05, 0.4)): (35.8, 42.1, 105.8),
    ("v-min", (18.522, 18.086, 9.337, 0.601, 0.37)): (562.141, 721.689, 1658.825),
    ("v-min", (1, 1, 2, 0.05, 0.4)): (37.8, 45.7, 111.8),
}


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize(
    ("case", "authors"), AUTHORS.items(), ids=[f"{name}-{p[0]}" for name, p in AUTHORS]
)
def test_given_costs_no_v_is_much_longer_than_the_authors(
    case: tuple, authors: tuple[float, ...]
) -> None:
    """Half a percent at most. Nor does it hold more than at equal times, which is the limit."""
    name, (*passes, hop, residue) = case
    for (ranks, microbatches), takes in zip(((4, 8), (8, 8), (8, 24)), authors, strict=True):
        halves = (time / 2 for time in passes)
        costs = Costs.uniform(2 * ranks, *halves, activation=0.5, residue=residue / 2, comm=hop)
        limit = max(simulate(build(name, ranks, microbatches), costs).peak_memory)
        timeline = simulate(build(name, ranks, microbatches, costs, limit), costs)
        check(timeline.schedule, costs, limit)
        assert timeline.makespan <= 1.005 * takes


def test_overlap_pays_only_with_an_overlap() -> None:
    """Hiding part of a pair's shorter half shortens DualPipe-V, which without that is no better
    than ZB-H1."""
    schedule = build("dualpipe-v", ranks=4, microbatches=16)
    plain = simulate(schedule, Costs.uniform(8))
    hidden = simulate(schedule, replace(Costs.uniform(8), forward_exchange=(0.5,) * 8))
    assert hidden.makespan < plain.makespan
    h1 = simulate(
        build("zb-h1", ranks=4, microbatches=16), Costs.uniform(4, forward=2, backward=2, weight=2)
    )
    assert plain.makespan == h1.makespan


def test_automatic_uses_the_costs_of_every_stage() -> None:
    """p=4, m=8, F and B of the last stage 1.4 times as heavy, a hop 0.1 of F, W keeping half: 680
    -> 620, 9% shorter.

    Fed with median costs, as the published runtime does, the heuristic finds no better than ZB-H1.
    """
    heavy = (20, 20, 20, 28)
    costs = Costs(heavy, heavy, (20, 20, 20, 20), residue=(0.5,) * 4, comm=2)
    median = Costs.uniform(4, 20, 20, 20, comm=2, residue=0.5)
    fed_median = build("zb-1p", 4, 8, costs=median)
    fed_stages = build("zb-1p", 4, 8, costs=costs)
    assert simulate(build("zb-h1", 4, 8), costs).cost == 680
    assert simulate(fed_median, costs).cost == 680
    assert simulate(fed_stages, costs).cost == 620
    check(fed_stages, costs, memory_limit=4)


@pytest.mark.parametrize("name", ["zb-1p", "zb-2p"])
def test_automatic_is_never_longer_than_the_handcrafted_order(name: str, random_costs) -> None:
    """ZB-H1 always fits into zb-1p's memory, ZB-H2 into zb-2p's."""
    generator = random.Random(name)
    handcrafted = {"zb-1p": "zb-h1", "zb-2p": "zb-h2"}[name]
    for ranks in (1, 2, 3, 4, 6):
        for microbatches in (1, 2, 5, 12):
            costs = random_costs(generator, ranks)
            reference = simulate(build(handcrafted, ranks, microbatches), costs)
            schedule = build(name, ranks, microbatches, costs=costs)
            assert simulate(schedule, costs).cost <= reference.cost


def test_automatic_obeys_a_memory_limit() -> None:
    costs = Costs.uniform(4, residue=0.4)
    spans = []
    for limit in (1, 2, 3, 4, 6, 8):
        schedule = build("zb-2p", 4, 12, costs=costs, memory_limit=limit)
        check(schedule, costs, memory_limit=limit)
        spans.append(simulate(schedule, costs).cost)
    assert spans == sorted(spans, reverse=True)
    with pytest.raises(ScheduleError, match=r"at its peak, but memory_limit is 0\.5; raise"):
        build("zb-2p", 4, 12, costs=costs, memory_limit=0.5)
