"""The search: never longer than a name, never below the bound, the same again, and plain errors."""

import json
import math
import random
import time
from dataclasses import replace
from fractions import Fraction
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.support.hostile_costs import outcome
from tests.support.plain_clock import ends_of
from zbcompile.schedules import (
    Costs,
    ScheduleError,
    bound,
    build,
    check,
    lower,
    names,
    search,
    simulate,
)
from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.generators.registry import FAMILIES, admitted_task, find, generated
from zbcompile.schedules.searching import hunt, starting_orders
from zbcompile.schedules.searching.annealing import Annealer
from zbcompile.schedules.searching.clock import Order, PassTimes
from zbcompile.schedules.searching.dispatcher import BETWEEN_LOOKS, Direction, _Dispatch
from zbcompile.schedules.searching.justification import Justifier, turned_around
from zbcompile.schedules.searching.problem import Problem
from zbcompile.schedules.searching.question import problems_of
from zbcompile.schedules.searching.search_budget import Budget
from zbcompile.schedules.searching.starting_orders import HEURISTIC_SECONDS, named_orders, one_by_one


def uneven(generator: random.Random, stages: int, **options) -> Costs:
    """Stages that differ, and a heavy last one."""

    def drawn() -> tuple[float, ...]:
        return tuple(generator.uniform(0.7, 1.3) for _ in range(stages))

    forward = drawn()
    return Costs(
        (*forward[:-1], 2 * forward[-1]),
        drawn(),
        drawn(),
        activation=drawn(),
        residue=tuple(generator.uniform(0, 0.7) for _ in range(stages)),
        comm=generator.choice((0, 0.2)),
        **options,
    )


@pytest.mark.parametrize("number", range(12))
def test_never_longer_than_a_name_and_never_below_the_bound(number: int) -> None:
    generator = random.Random(number)
    ranks, microbatches, barrier = generator.choice((2, 3, 4)), generator.randint(2, 9), generator.random() < 0.5
    costs = uneven(generator, 2 * ranks)
    limit = generator.choice((None, 2.2 * ranks, 1.2 * ranks + 1.5))
    try:
        found = search(costs, ranks, microbatches, limit, barrier=barrier, moves=300, seconds=60)
    except ScheduleError as error:
        assert "no order fits" in str(error)  # noqa: PT017 whether one fits is up to the draw
        return
    used = found.simulation.costs
    check(lower(found.schedule), used, limit)
    assert found.schedule.name == "auto"
    assert found.bound <= found.objective * (1 + 1e-9)
    for name in sorted({*names()} - {"auto"}):
        for chunks in (1, 2):
            try:
                cut = costs.resized(chunks * ranks)
                schedule = build(name, ranks, microbatches, cut, limit, chunks)
                check(schedule, cut, limit)
            except ScheduleError:
                continue
            if schedule.placement.kind != "dual":
                step = simulate(schedule, cut)
                assert found.objective <= (step.makespan if barrier else step.cost) * (1 + 1e-9)
                least = bound(costs, ranks, microbatches, schedule.placement, limit, barrier)
                assert least <= (step.makespan if barrier else step.cost) * (1 + 1e-9)


def test_the_same_seed_and_moves_find_the_same_order() -> None:
    costs = uneven(random.Random(3), 6)
    first, second = (search(costs, 3, 7, 6.5, moves=500, seed=4) for _ in range(2))
    assert first.schedule == second.schedule


def test_textbook_costs_are_proven_optimal() -> None:
    found = search(Costs.uniform(4), 4, 8, placements=["linear"], moves=100)
    assert (found.objective, found.bound, found.proven, found.gap) == (27, 27, True, 0)
    assert "proven optimal" in str(found)


def test_exact_numbers_stay_exact() -> None:
    costs = Costs.uniform(3, Fraction(1, 3), Fraction(1, 3), Fraction(1, 3))
    assert search(costs, 3, 4, moves=200).objective == Fraction(14, 3)


def test_every_move_is_timed_as_the_simulator_would() -> None:
    """After hundreds of moves, kept or taken back, the clock and every memory are those of a fresh evaluation."""
    generator = random.Random(5)
    costs = uneven(generator, 6, vocab_s=(0.2,) * 6, vocab_t=(0.3,) * 6)
    (problem,) = problems_of(costs, 3, 5, 9.0, ["v"], True, 1)
    _, words, _ = next(iter(named_orders(problem)))
    annealer = Annealer(problem, words, seed=1)
    annealer.run(lambda moves: moves / 700, target=0)
    assert problem.fits(annealer.order.words)
    clock, fresh = annealer.clock, PassTimes(annealer.order)
    assert fresh.complete
    assert fresh.end == pytest.approx(clock.end)
    assert fresh.tail == pytest.approx(clock.tail)
    assert ends_of(problem, annealer.order.words, clock.time, clock.delay) == pytest.approx(clock.end[:-1])
    schedule = problem.schedule(annealer.best_words)
    check(lower(schedule), costs)
    assert simulate(schedule, costs).makespan == pytest.approx(annealer.best)


def test_costs_without_a_finite_sum_are_refused() -> None:
    with pytest.raises(ScheduleError, match="add up to more than a float can be"):
        search(Costs((1e308,), (1,), (1,)), 1, 2)
    for limit, kept in ((math.inf, 1), (4, 1e-300)):
        assert search(Costs((1,), (1,), (1,), activation=(kept,)), 1, 2, limit, moves=0).proven


@pytest.mark.parametrize("number", [*range(18), 35, 69])
def test_costs_that_nobody_measures(number: int) -> None:
    """More of them: `python -m tests.support.hostile_costs`."""
    assert outcome(number) in ("refused", "found", "proven")


class CountedClock:
    """A clock for searches that counts how often some function was called."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.calls = 0
        counted = getattr(owner, name)

        def wrapped(*arguments: object) -> object:
            self.calls += 1
            return counted(*arguments)

        patch.setattr(owner, name, wrapped)
        patch.setattr(time, "monotonic", lambda: self.calls)


def test_seconds_are_a_cap_of_names_that_take_long_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name is begun that would end late if it took as long as the one before."""
    CountedClock(monkeypatch, starting_orders, "_built")
    (problem,) = problems_of(Costs.uniform(4), 4, 8, None, ["linear"], True, 1)
    taken = [name for name, _, _ in named_orders(problem, Budget(3.5, None))]
    assert taken == [family.name for family in FAMILIES[:3]]


def test_names_with_a_heuristic_of_their_own_are_left_out_of_a_short_search() -> None:
    """zb-1p and zb-2p try eight orders; where passes are many, that would take most of the seconds."""
    (problem,) = problems_of(Costs.uniform(8), 8, 64, None, ["linear"], True, 1)
    heuristic = {"zb-1p", "zb-2p"}
    for share, expected in ((1.9, set()), (2.1, heuristic)):
        budget = Budget(share * HEURISTIC_SECONDS * len(problem.time), None)
        budget.start = math.inf  # no time passes
        assert {name for name, _, _ in named_orders(problem, budget)} & heuristic == expected


@pytest.mark.slow
def test_seconds_are_a_cap_of_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes with each pass of the model that a turn begins; the second of two turns is broken off."""
    begun = CountedClock(monkeypatch, _Dispatch, "_start")
    costs = replace(uneven(random.Random(1), 32), comm=0.05)
    passes = 32 * 64 * 3
    found = search(costs, 16, 64, 20 * sum(costs.activation) / 32, ["v"], seconds=1.5 * passes)
    assert 1.5 * passes <= begun.calls <= 1.5 * passes + BETWEEN_LOOKS
    assert found.objective < 2 * found.bound


def test_what_is_late_has_a_bound_and_an_order() -> None:
    found = search(uneven(random.Random(3), 8), 4, 8, seconds=0)
    assert found.objective >= found.bound > 0


def test_bytes_times_seconds_beyond_a_float_bound_nothing() -> None:
    costs = Costs((1e300, 1), (1, 1), (1, 1), activation=(1e300, 1))
    found = search(costs, 2, 3, 2e300, ["linear"], moves=0)
    assert found.bound <= found.objective * (1 + 1e-9)


def test_limits_may_differ_by_rank() -> None:
    costs = Costs.uniform(3, activation=1000)
    found = search(costs, 3, 6, memory_limit=[3000, 2000, 1000], moves=300)
    assert all(peak <= limit for peak, limit in zip(found.simulation.peak_memory, (3000, 2000, 1000), strict=True))


def test_vocabulary_passes_and_the_optimizer_count() -> None:
    costs = Costs.uniform(4, optimizer=2)
    shards = Costs(
        costs.forward, costs.backward, costs.weight, vocab_s=(0.5,) * 4, vocab_t=(0.5,) * 4, optimizer=(2,) * 4
    )
    plain, found = (search(each, 4, 6, placements=["linear"], moves=500) for each in (costs, shards))
    assert found.schedule.shards == (0, 1, 2, 3)
    check(lower(found.schedule), shards)
    assert plain.objective >= plain.bound == 6 * 3 + 3 + 2
    assert found.objective >= found.bound > plain.bound


def test_two_copies_only_on_request() -> None:
    costs = Costs.uniform(4)
    assert "dual" not in {placement for _, placement in search(costs, 4, 8, moves=100).names}
    found = search(costs, 4, 8, placements=["dual"], moves=200)
    check(lower(found.schedule), costs)


def test_of_equally_short_orders_the_one_that_holds_least_is_found() -> None:
    """The last stage takes so long that every name hides its bubble behind it, those too that hold twice as much."""
    ranks = 8
    times = (*[1.0] * (ranks - 1), 1.8)
    passes = (tuple(share * time for time in times) for share in (1, 1.05, 0.7))
    costs = Costs(*passes, activation=(1.0,) * ranks, residue=(0.5,) * ranks, comm=0.02)
    found = search(costs, ranks, 4 * ranks, placements=["linear"], moves=0)
    assert found.proven
    held = {o.name: max(peak_memory(o, costs)) for value, o in found.named if value <= found.bound * (1 + 1e-9)}
    assert {"zb-h1", "zb-2p"} <= held.keys()
    assert max(found.simulation.peak_memory) <= min(held.values()) < held["zb-2p"]


def test_an_equally_short_order_holds_less_than_every_name() -> None:
    """Half of what names hold is enough if one rank takes twice as long as the others."""
    costs = Costs(*[(*[1.0] * 7, 2.0)] * 3, activation=(1.0,) * 8)
    found = search(costs, 8, 16, placements=["linear"], moves=0)
    assert found.proven
    shortest = (order for value, order in found.named if value <= found.bound * (1 + 1e-9))
    assert max(found.simulation.peak_memory) == 4 < min(max(peak_memory(order, costs)) for order in shortest)


def test_large_models_are_planned_with_an_order_that_holds_less_and_is_as_short() -> None:
    """Seconds and GiB of Llama 3 405B's stages on H100: the names that are as short hold 1.4 times as much, or more."""
    passes = (0.5717, 0.6515, 0.6222), (0.7070, 0.8083, 0.7662), (0.5531, 0.6243, 0.5975)
    kept, left = (40.75, *[46.54] * 6, 45.41), (28.03, *[31.75] * 6, 29.99)
    rows = ((first, *[middle] * 6, last) for first, middle, last in passes)
    costs = Costs(*rows, activation=kept, residue=left, comm=2e-5)
    found = search(costs, 8, 32, placements=["linear"], moves=0)
    shortest = [order for value, order in found.named if value <= found.objective * (1 + 1e-9)]
    assert shortest
    peaks = [max(peak_memory(order, costs)) for order in (found.schedule, *shortest)]
    assert 1.4 * peaks[0] < min(peaks[1:])


def test_what_is_turned_around_keeps_within_memory_and_comes_to_an_end() -> None:
    costs = uneven(random.Random(2), 6)
    (problem,) = problems_of(costs, 3, 6, 5.0, ["looped:2"], True, 1)
    lean = one_by_one(problem)
    assert problem.fits(lean)
    words = turned_around(problem, lean)
    assert words is not None
    check(problem.schedule(words), costs, 5.0)
    assert simulate(problem.schedule(words), costs).makespan < simulate(problem.schedule(lean), costs).makespan


@pytest.mark.parametrize("number", range(4))
def test_more_moves_never_give_a_longer_order(number: int) -> None:
    """A search with fewer moves is the beginning of one with more."""
    generator = random.Random(number)
    costs, limit = uneven(generator, 8), generator.choice((None, 3.0, 5.0))
    values = [search(costs, 4, 8, limit, moves=moves, seconds=600).objective for moves in (0, 150, 700, 2500)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("limit", [None, 5.0])
def test_ranks_that_choose_come_to_a_legal_order_in_both_directions_of_time(limit: float | None) -> None:
    """Whatever the priorities: within memory, and no longer than it says."""
    generator = random.Random(7)
    costs = uneven(generator, 6, vocab_s=(0.2,) * 6, vocab_t=(0.3,) * 6)
    (problem,) = problems_of(costs, 3, 6, limit, ["v"], False, 1)
    for backward in (False, True) * 3:
        priority = [generator.random() for _ in problem.waits]
        found = Direction(problem, backward).dispatch(priority, generator.choice((0, 0.5, 1)))
        assert found is not None
        words = [word[:: -1 if backward else 1] for word in found.words]
        assert problem.fits(words)
        schedule = problem.schedule(words)
        check(schedule, costs, limit)
        assert simulate(schedule, costs).cost <= found.value * (1 + 1e-9)


def test_turning_an_order_around_shortens_it() -> None:
    """What annealing needs many moves for: one microbatch after the other becomes an order close to the bound."""
    costs = uneven(random.Random(4), 8)
    (problem,) = problems_of(costs, 4, 8, 5.0, ["v"], True, 1)
    justifier = Justifier(problem, [one_by_one(problem)], math.inf, seed=1)
    justifier.run(lambda moves: moves / 2600, target=0)
    assert justifier.best_words is not None
    assert problem.fits(justifier.best_words)
    step = simulate(problem.schedule(justifier.best_words), costs)
    assert step.makespan <= justifier.best * (1 + 1e-9)
    assert step.makespan < min(simulate(named, costs).makespan for _, _, named in named_orders(problem))


@pytest.mark.parametrize("name", starting_orders.TURNED)
def test_a_v_for_given_costs_is_turned_around(name: str) -> None:
    """It holds no more on its fullest rank, and stands so among the names of a search."""
    shorter = 0
    for seed in range(6):
        costs = uneven(random.Random(seed), 8)
        family = find(name)
        plain = generated(family, admitted_task(family, 4, 9, None, {}, costs), {})
        turned = build(name, 4, 9, costs)
        check(turned, costs)
        before, after = simulate(plain, costs), simulate(turned, costs)
        assert after.makespan <= before.makespan
        assert after.cost <= before.cost
        assert max(after.peak_memory) <= max(before.peak_memory) * (1 + 1e-9)
        shorter += after.makespan < before.makespan
        assert search(costs, 4, 9, placements=["v"], moves=0).names[name, "v"] == after.makespan
    assert shorter >= 3
    assert build(name, 4, 9, Costs.uniform(8)).orders == build(name, 4, 9).orders


def test_interrupting_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(hunt.Annealer, "run", interrupted)
    found = search(uneven(random.Random(1), 4), 4, 8, placements=["linear"])
    assert found.objective == min(found.names.values()) or found.origin not in names()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"memory_limit": 1.5},
            r"no order fits\n  placement linear: rank 0 needs 2 for one microbatch, 0\.5 more than",
        ),
        ({"memory_limit": [4, 4]}, "memory_limit has 2 entries for 4 ranks"),
        ({"costs": Costs.uniform(6)}, "costs of 6 stages for 4 ranks; give a multiple of 4"),
        ({"placements": ["v", "w"]}, "placement 'w'; expected linear, looped:N"),
        ({"placements": ["looped"]}, "placement 'looped'; expected linear, looped:N"),
        ({"placements": []}, "placements is empty"),
        ({"placements": ["looped:3"]}, "cannot be merged into the 12 stages of placement looped:3"),
        ({"ranks": 0}, "ranks=0; expected a whole number"),
    ],
)
def test_wrong_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        search(**{"costs": Costs.uniform(8), "ranks": 4, "microbatches": 6, "moves": 1, **arguments})


def test_auto_is_a_name_like_any_other() -> None:
    schedule = build("Auto", 2, 5, chunks=1)
    assert schedule.placement.kind == "linear"
    assert build("auto", 2, 5, Costs.uniform(4)).stages == 4
    with pytest.raises(ScheduleError, match="auto: unknown option exact; expected objective, moves"):
        build("auto", 2, 5, exact=True)
    with pytest.raises(ScheduleError, match="costs of 3 stages for a schedule of 4"):
        build("auto", 2, 5, Costs.uniform(3))


def test_a_circle_is_no_order() -> None:
    """Words that wait for each other are told from those that run to their end."""
    costs = Costs.uniform(2)
    problem = Problem(build("1f1b", 2, 2).placement, 2, costs)
    words = one_by_one(problem)
    words[0] = sorted(words[0], key=lambda n: problem.actions[n].op)  # B before F
    assert not PassTimes(Order(problem, words)).complete


SAMPLES = {
    "search_random": ("--first", "13", "--settings", "15", "--moves", "60"),
    "search_large": ("--sizes", "2x4", "--moves", "60"),
    "search_authors": ("--ranks", "2", "--microbatches", "4", "--profiles", "1.5B", "--moves", "20"),
    "search_optimum": ("--instances", "3", "--moves", "2000", "--seconds", "20"),
}


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize("script", SAMPLES)
def test_the_benchmarks_run_and_go_on_where_they_stopped(script: str, tmp_path: Path) -> None:
    if script == "search_optimum":
        pytest.importorskip("ortools", reason="proves the optima of this benchmark: pip install ortools")
    file = Path(__file__).parents[3] / "examples" / "benchmarks" / f"{script}.py"
    spec = spec_from_file_location(script, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = tmp_path / "rows.jsonl"
    first = module.main([*SAMPLES[script], "--output", str(rows)])
    written = rows.read_text()
    assert module.main([*SAMPLES[script], "--output", str(rows)]) == first
    assert rows.read_text() == written
    for line in map(json.loads, written.splitlines()):
        assert line["bound"] <= line["found"] * (1 + 1e-9)
        assert line["found"] <= (line.get("best_name") or math.inf) * (1 + 1e-9)


@pytest.mark.slow
def test_a_large_step_is_searched_at_its_end_and_never_longer_than_a_name() -> None:
    """More passes than are annealed as a whole: every name is tried, moves stay near the end of the critical path."""
    costs = uneven(random.Random(9), 16)
    found = search(costs, 16, 430, placements=["linear"], moves=10, seconds=600)
    assert len(found.schedule.orders[0]) * 16 > hunt.HUGE
    assert found.bound <= found.objective <= min(found.names.values())
    check(found.schedule, costs)
