"""Names, spellings, admitted counts, and the errors for everything else."""

import itertools

import pytest

from zbcompile import schedules
from zbcompile.schedules import Costs, ScheduleError, admits, build, smallest_microbatches


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        *((spelling, "zb-v") for spelling in ("zbv", "ZB-V", "zb_v", "Zb V")),
        # of torch
        ("ScheduleGPipe", "gpipe"),
        ("ScheduleLoopedBFS", "looped-bfs"),
        ("Schedule1F1B", "1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved-1f1b"),
        ("ScheduleInterleavedZeroBubble", "interleaved-zb"),
        ("ScheduleZBVZeroBubble", "zb-v"),
        ("ScheduleDualPipeV", "dualpipe-v"),
    ],
)
def test_any_spelling_builds_the_same(spelling: str, name: str) -> None:
    assert build(spelling, ranks=2, microbatches=4) == build(name, ranks=2, microbatches=4)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "message"),
    [
        ("interleaved-1f1b", 4, 11, r"groups of equal size; use 12"),
        ("interleaved-zb", 4, 9, r"use 10"),
        ("dualpipe", 4, 7, r"microbatches >= 2 x ranks; use 8"),
        ("dualpipe", 4, 13, r"use 14"),
        ("dualpipe", 3, 8, r"even ranks .*; no number works on 3 ranks"),
        ("dualpipe-v", 4, 7, r"microbatches >= 2 x ranks; use 8"),
    ],
)
def test_inadmissible_counts_name_the_rule_and_the_nearest(
    name: str, ranks: int, microbatches: int, message: str
) -> None:
    assert not admits(name, ranks, microbatches)
    with pytest.raises(ScheduleError, match=message):
        build(name, ranks, microbatches)


def test_smallest_microbatches() -> None:
    assert smallest_microbatches("1f1b", ranks=4, at_least=8) == 8
    assert smallest_microbatches("interleaved-zb", ranks=4, at_least=17, chunks=3) == 20
    assert smallest_microbatches("dualpipe", ranks=4) == 8
    with pytest.raises(ScheduleError, match="no number of microbatches works on 3 ranks"):
        smallest_microbatches("dualpipe", ranks=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "zb-h3"}, r"no schedule is called 'zb-h3'; did you mean .*zb-h[12]"),
        ({"name": "?"}, "known names: gpipe, "),
        ({"ranks": 0}, "ranks=0; expected a whole number"),
        ({"microbatches": 2.5}, "microbatches=2.5; expected a whole number"),
        ({"chunks": 2}, "chunks=2; a rank holds exactly 1"),
        ({"exact": True}, "unknown option exact; it has none"),
        ({"name": "zb-h1-lazy", "exakt": True}, "unknown option exakt; expected exact"),
        ({"name": "auto", "exact": True}, "auto: unknown option exact; it has none"),
        ({"name": "auto", "ranks": 2, "costs": Costs.uniform(3)}, "costs of 3 stages for a sched"),
        ({"costs": Costs.uniform(3)}, "costs of 3 stages for a schedule of 4"),
        ({"memory_limit": 3}, r"holds 4 at its peak, but memory_limit is 3; raise the limit"),
        ({"name": "zb-2p", "memory_limit": float("nan")}, "memory_limit=nan; expected"),
        ({"name": "zb-2p", "memory_limit": True}, "memory_limit=True; expected"),
        ({"name": "interleaved-zb", "group": 0}, "group=0; expected a whole number"),
        (
            {"name": "interleaved-zb", "ranks": 5, "microbatches": 5, "chunks": 4, "group": 1},
            "wait for each",
        ),
    ],
)
def test_wrong_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(**{"name": "1f1b", "ranks": 4, "microbatches": 8, **arguments})


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-1f1b-overlap", "interleaved-zb"])
def test_groups_and_chunks_of_any_size(name: str) -> None:
    """Every order that is built is right; the others would wait for each other, and are refused."""
    built, refused = 0, 0
    for ranks, chunks, count, group in itertools.product((2, 4), (1, 3), (2, 5, 9), (1, 3, 5)):
        try:
            schedule = build(name, ranks, count, chunks=chunks, group=group)
        except ScheduleError:
            refused += 1
        else:
            schedules.check(schedules.lower(schedule))
            built += 1
    assert built > 2 * refused
    assert build(name, 4, 8, group=4) == build(name, 4, 8)
