"""`simulate`: figures of the literature, what hops, pairs, links and barriers mean, the bookkeeping
of idle time, and the critical path, which is a proof of a length."""

import itertools
import random

import pytest

from zbcompile.schedules import (
    Action,
    Costs,
    Link,
    Pair,
    Placement,
    Schedule,
    ScheduleError,
    build,
    critical_path,
    lower,
    names,
    simulate,
)


def test_a_hop_delays_but_does_not_occupy() -> None:
    t = simulate(build("gpipe", ranks=2, microbatches=2), Costs.uniform(2, forward=10, comm=3))
    assert [(s.start, s.end) for s in t.spans_of(1)][:2] == [(13, 23), (23, 33)]
    turn = simulate(build("zb-v", ranks=1, microbatches=1), Costs.uniform(2, comm=100))
    assert turn.makespan == 6  # the turn of a V is free


def test_links_have_latency_and_bandwidth() -> None:
    links = (Link(0, 1, 1, 2), Link(1, 0, 5, 3))
    costs = Costs((10, 10), (10, 10), (0, 0), message=(6, 0), links=links)
    t = simulate(build("gpipe", ranks=2, microbatches=1), costs)
    assert t.makespan == 10 + (1 + 6 / 2) + 20 + (5 + 6 / 3) + 10
    assert t.spans_of(1)[0].start == 10 + (1 + 6 / 2)  # each direction has its own link


def test_a_pair_runs_as_one_step() -> None:
    schedule = build("1f1b-overlap", ranks=1, microbatches=3)
    paired = sum(isinstance(step, Pair) for step in schedule.orders[0])
    assert paired
    plain = simulate(schedule, Costs.uniform(1, 2, 3, 1))
    hidden = simulate(schedule, Costs((2,), (3,), (1,), forward_exchange=(2,)))
    assert plain.makespan == 3 * 6
    assert hidden.makespan == 3 * 6 - 2 * paired
    assert [s.end - s.start for s in hidden.spans if isinstance(s.step, Pair)] == [4] * paired


def test_the_optimizer_lengthens_the_step() -> None:
    schedule = build("zb-h2", ranks=4, microbatches=8)
    plain = simulate(schedule)
    updated = simulate(schedule, Costs.uniform(4, optimizer=5))
    assert updated.makespan == plain.makespan + 5
    assert (updated.cost, updated.work) == (plain.cost + 5, plain.work + 5)


def test_memory_counts_what_b_leaves_for_w() -> None:
    """ZB-H1: (p-r) activations + r residues; ZB-H2: (2p-2r-1) and 2r."""
    costs = Costs.uniform(4, activation=10, residue=4)
    peaks = [simulate(build(name, 4, 12), costs).peak_memory for name in ("zb-h1", "zb-h2")]
    assert peaks[0] == tuple((4 - r) * 10 + r * 4 for r in range(4))
    assert peaks[1] == tuple((7 - 2 * r) * 10 + 2 * r * 4 for r in range(4))


@pytest.mark.parametrize("name", names())
def test_time_is_work_or_idle_memory_has_its_peak_and_the_critical_path_is_the_step(
    name: str, random_costs
) -> None:
    generator = random.Random(name)
    for ranks, microbatches in ((2, 4), (4, 8)):
        schedule = build(name, ranks, microbatches)
        costs = random_costs(generator, schedule.stages)
        for program in (schedule, lower(schedule)):
            t, idle = simulate(program, costs), [0.0] * ranks
            for interval in t.idle:
                assert interval.end > interval.start
                idle[interval.rank] += interval.end - interval.start
            assert all(idle[r] + t.busy[r] == t.finish == t.makespan for r in range(ranks))
            path = critical_path(t)
            assert (path[0].start, path[-1].end) == (0, t.finish)
            for step, following in itertools.pairwise(path):
                assert following.start == pytest.approx(step.end + step.travel)
                # there a SEND may have waited for the very rank it sends to
                assert program.is_lowered or not step.travel or step.rank != following.rank
            length = sum(step.end - step.start + step.travel + step.overhead for step in path)
            assert length == pytest.approx(t.finish)
        for rank, peak in enumerate(t.peak_memory):
            times, amounts = zip(*t.memory_curve(rank), strict=True)
            assert (amounts[-1], max(amounts)) == (0, peak)
            assert [*times] == sorted(times)


def test_causes_of_idle_time() -> None:
    t = simulate(build("1f1b", ranks=2, microbatches=4), Costs.uniform(2, 10, 10, 10, comm=1))
    texts = [str(interval) for interval in t.idle if interval.rank == 0]
    assert texts[:2] == [
        "rank 0 idle 20 to 41: warm-up, waits for BW1.0 of rank 1",
        "rank 0 idle 41 to 42: communication, waits for BW1.0 of rank 1",
    ]
    last = "rank 1 idle 133 to 154: cool-down, waits until the last rank has finished"
    assert str(t.idle[-1]) == last


def test_vocabulary_passes_wait_for_the_last_stage_and_for_each_other() -> None:
    """S after the last forward, the last backward and T after S of every shard."""
    orders = (
        tuple(Action(op, rank, 0) for op in ops.split())
        for rank, ops in enumerate(("F S T BW", "F S BW T"))
    )
    schedule = Schedule("vocabulary", Placement.named("linear", 2), 1, (*orders,))
    costs = Costs((1, 1), (1, 1), (1, 1), vocab_s=(5, 3), vocab_t=(2, 2), comm=1)
    t = simulate(schedule, costs)
    assert " ".join(f"{s.step}:{s.start}-{s.end}" for s in t.spans) == (
        "F0.0:0-1 S0.0:4-9 T0.0:10-12 BW0.0:13-15 F1.0:2-3 S1.0:4-7 BW1.0:10-12 T1.0:12-14"
    )
    assert {i.cause for i in t.idle if i.step == Action("BW", 1, 0)} == {"warm-up", "communication"}


def test_what_cannot_run_is_refused() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match=r"costs of 4 stages for 2 .*see costs.resized\(2\)"):
        simulate(schedule, Costs.uniform(4))
    first, second = schedule.orders
    incomplete = Schedule("1f1b", schedule.placement, 2, (first[1:], second))
    with pytest.raises(ScheduleError, match="rank 0"):
        simulate(incomplete)
