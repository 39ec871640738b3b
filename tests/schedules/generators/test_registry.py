"""Names, spellings, admitted counts, and the errors for everything else."""

import itertools
import subprocess
import sys

import pytest

from zbcompile import schedules
from zbcompile.schedules import Costs, ScheduleError, admits, build, names, smallest_microbatches

CANONICAL = [
    "gpipe",
    "1f1b",
    "1f1b-overlap",
    "interleaved-1f1b",
    "interleaved-1f1b-overlap",
    "zb-h1",
    "zb-h1-lazy",
    "zb-h2",
    "zb-1p",
    "zb-2p",
    "interleaved-zb",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe",
    "dualpipe-v",
    "looped-bfs",
    "auto",
]


def test_names_are_the_canonical_ones() -> None:
    assert sorted(names()) == sorted(CANONICAL)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("zbv", "zb-v"),
        ("ZB-V", "zb-v"),
        ("zb_v", "zb-v"),
        ("Zb V", "zb-v"),
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


def test_unknown_name_shows_the_nearest() -> None:
    with pytest.raises(
        ScheduleError, match=r"no schedule is called 'zb-h3'; did you mean .*zb-h[12]"
    ):
        build("zb-h3", ranks=2, microbatches=4)
    with pytest.raises(ScheduleError, match="known names: gpipe, "):
        build("?", ranks=2, microbatches=4)


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
        ({"ranks": 0}, "ranks=0; expected a whole number"),
        ({"microbatches": 2.5}, "microbatches=2.5; expected a whole number"),
        ({"chunks": 2}, "chunks=2; a rank holds exactly 1"),
        ({"exact": True}, "unknown option exact; it has none"),
        ({"name": "zb-h1-lazy", "exakt": True}, "unknown option exakt; expected exact"),
        ({"costs": Costs.uniform(3)}, "costs of 3 stages for a schedule of 4"),
        (
            {"memory_limit": 3},
            r"rank 0 holds 4 at its peak, but memory_limit is 3; raise the limit",
        ),
    ],
)
def test_wrong_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(**{"name": "1f1b", "ranks": 4, "microbatches": 8, **arguments})


def test_import_is_light() -> None:
    """Neither torch nor sympy, and under 0.3 s of CPU time (interpreter start excluded; the best of
    three)."""
    program = (
        "import sys, time; start = time.process_time(); import zbcompile.schedules as s;"
        " s.build('zb-v', 4, 8); print(time.process_time() - start, *{'torch', 'sympy'} &"
        " {*sys.modules})"
    )
    command = [sys.executable, "-c", program]
    outputs = [subprocess.check_output(command, text=True, timeout=60).split() for _ in range(3)]
    assert {len(output) for output in outputs} == {1}
    assert min(float(output[0]) for output in outputs) < 0.3


def test_everything_public_exists() -> None:
    for name in schedules.__all__:
        assert getattr(schedules, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'biuld'"):
        schedules.biuld  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_refuses_a_wrong_import_name(tmp_path) -> None:
    """A user's own `schedules` on sys.path must not silently be this package."""
    folder = schedules.__path__[0]
    (tmp_path / "schedules").symlink_to(folder)
    command = [sys.executable, "-c", "import schedules"]
    outcome = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert "import this package as 'zbcompile.schedules', not as 'schedules'" in outcome.stderr


def test_counts_of_interleaved_schedules_are_those_that_the_message_says() -> None:
    for ranks, microbatches in itertools.product(range(1, 9), range(1, 49)):
        expected = (
            microbatches < 2 * ranks
            or microbatches % ranks == 0
            or microbatches % (microbatches // ranks) == 0
        )
        assert admits("interleaved-zb", ranks, microbatches) == expected


GROUPED = ("interleaved-1f1b", "interleaved-1f1b-overlap", "interleaved-zb")


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_any_size(name: str) -> None:
    """Every order that is built is right; the others would wait for each other, and the error says
    so."""
    built, refused = 0, 0
    for ranks, chunks, count, group in itertools.product(
        (2, 3, 4), (2, 3), (2, 5, 7, 9), (1, 2, 3, 4, 5)
    ):
        try:
            schedule = build(name, ranks, count, chunks=chunks, group=group)
        except ScheduleError:
            refused += 1
        else:
            schedules.check(schedules.lower(schedule))
            built += 1
    assert built > 2 * refused
    assert build(name, 4, 8, group=4) == build(name, 4, 8)
    with pytest.raises(ScheduleError, match="wait for each other"):
        build(name, 5, 5, chunks=4, group=1)
    with pytest.raises(ScheduleError, match="group=0; expected a whole number"):
        build(name, 2, 4, group=0)


def test_a_short_last_group() -> None:
    """Two ranks, two chunks, five microbatches in groups of three."""
    order = build("interleaved-1f1b", 2, 5, group=3).orders[0]
    forwards = " ".join(str(step) for step in order if step[0] == "F")
    assert forwards == "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 F0.3 F0.4 F2.3 F2.4"
