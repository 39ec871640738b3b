"""The search: never longer than a name, never below the bound, the same again, and plain errors."""

import json
import math
import random
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

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
from zbcompile.schedules.searching.dispatcher import Direction
from zbcompile.schedules.searching.forward_backward import forward_backward_pass
from zbcompile.schedules.searching.order_search import scheduling_problems
from zbcompile.schedules.searching.problem import SchedulingProblem


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


@pytest.mark.mostly_slow(every=4, suite=1)
@pytest.mark.parametrize("number", range(12))
def test_never_longer_than_a_name_and_never_below_the_bound(number: int) -> None:
    generator = random.Random(number)
    ranks, microbatches, barrier = (
        generator.choice((2, 3, 4)),
        generator.randint(2, 9),
        generator.random() < 0.5,
    )
    costs = uneven(generator, 2 * ranks)
    limit = generator.choice((None, 2.2 * ranks, 1.2 * ranks + 1.5))
    try:
        result = search(costs, ranks, microbatches, limit, barrier=barrier)
    except ScheduleError as error:
        assert "no order fits" in str(error)  # noqa: PT017 whether one fits is up to the draw
        return
    merged = result.simulation.costs
    check(lower(result.schedule), merged, limit)
    assert result.schedule.name == "auto"
    assert result.bound <= result.objective * (1 + 1e-9)
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
                assert result.objective <= (step.makespan if barrier else step.cost) * (1 + 1e-9)
                least = bound(costs, ranks, microbatches, schedule.placement, limit, barrier)
                assert least <= (step.makespan if barrier else step.cost) * (1 + 1e-9)


def test_the_same_arguments_find_the_same_order() -> None:
    costs = uneven(random.Random(3), 6)
    first, second = (search(costs, 3, 7, 6.5) for _ in range(2))
    assert first.schedule == second.schedule


def test_textbook_costs_are_proven_optimal() -> None:
    result = search(Costs.uniform(4), 4, 8, placements=["linear"])
    assert (result.objective, result.bound, result.proven, result.gap) == (27, 27, True, 0)
    assert "proven optimal" in str(result)


def test_limits_may_differ_by_rank() -> None:
    costs = Costs.uniform(3, activation=1000)
    result = search(costs, 3, 6, memory_limit=[3000, 2000, 1000])
    assert all(
        peak <= limit
        for peak, limit in zip(result.simulation.peak_memory, (3000, 2000, 1000), strict=True)
    )


def test_vocabulary_passes_and_the_optimizer_count() -> None:
    costs = Costs.uniform(4, optimizer=2)
    shards = Costs(
        costs.forward,
        costs.backward,
        costs.weight,
        vocab_s=(0.5,) * 4,
        vocab_t=(0.5,) * 4,
        optimizer=(2,) * 4,
    )
    plain, result = (search(of_model, 4, 6, placements=["linear"]) for of_model in (costs, shards))
    assert result.schedule.shards == (0, 1, 2, 3)
    check(lower(result.schedule), shards)
    assert plain.objective >= plain.bound == 6 * 3 + 3 + 2
    assert result.objective >= result.bound > plain.bound


def test_two_copies_only_on_request() -> None:
    costs = Costs.uniform(4)
    assert search(costs, 4, 8).schedule.placement.kind != "dual"
    result = search(costs, 4, 8, placements=["dual"])
    check(lower(result.schedule), costs)


def test_of_equally_short_orders_the_one_that_holds_least_is_found() -> None:
    """The last stage takes so long that every name hides its bubble behind it, those too that hold
    twice as much."""
    ranks = 8
    times = (*[1.0] * (ranks - 1), 1.8)
    passes = (tuple(share * time for time in times) for share in (1, 1.05, 0.7))
    costs = Costs(*passes, activation=(1.0,) * ranks, residue=(0.5,) * ranks, comm=0.02)
    result = search(costs, ranks, 4 * ranks, placements=["linear"], passes=0)
    named = [build(name, ranks, 4 * ranks, costs) for name in ("zb-h1", "zb-2p")]
    for schedule in named:
        assert simulate(schedule, costs).makespan == pytest.approx(result.objective)
    least, most = (max(peak_memory(schedule, costs)) for schedule in named)
    assert max(result.simulation.peak_memory) <= least < most


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
        search(
            **{"costs": Costs.uniform(8), "ranks": 4, "microbatches": 6, "passes": 1, **arguments}
        )


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: build("zb-2p", 4, 8, memory_limit=float("nan")), "memory_limit=nan; expected"),
        (lambda: build("zb-2p", 4, 8, memory_limit=True), "memory_limit=True; expected"),
        (
            lambda: search(Costs.uniform(4), 4, 8, memory_limit="80GiB"),
            "memory_limit='80GiB'; expected a number",
        ),
        (
            lambda: search(Costs.uniform(4), 4, 8, memory_limit=[8, 8, 8, float("nan")]),
            "memory_limit=nan; expected",
        ),
        (
            lambda: search(Costs.uniform(4), 4, 8, placements="linear"),
            r"placements='linear'; expected a list, such as \['linear'\]",
        ),
        (lambda: check(None), "received None; expected a Schedule"),
    ],
)
def test_what_cannot_be_asked(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        ask()


def test_a_step_that_takes_no_time_can_be_shown() -> None:
    result = search(Costs.uniform(2, 0, 0, 0), 2, 2, placements=["linear"], passes=0)
    assert "the best name" in str(result)


def test_auto_is_a_name_like_any_other() -> None:
    schedule = build("Auto", 2, 5, chunks=1)
    assert schedule.placement.kind == "linear"
    assert build("auto", 2, 5, Costs.uniform(4)).stages == 4
    with pytest.raises(ScheduleError, match="auto: unknown option exact; it has none"):
        build("auto", 2, 5, exact=True)
    with pytest.raises(ScheduleError, match="costs of 3 stages for a schedule of 4"):
        build("auto", 2, 5, Costs.uniform(3))


def problem_of(
    costs: Costs, ranks: int, microbatches: int, limit: float | None, placement: str
) -> SchedulingProblem:
    (problem,) = scheduling_problems(costs, ranks, microbatches, limit, [placement], True, 1)
    return problem


def test_a_forward_backward_pass_keeps_within_memory_and_shortens_the_sequential_order() -> None:
    costs = uneven(random.Random(2), 6)
    problem = problem_of(costs, 3, 6, 5.0, "looped:2")
    order = problem.order_of(problem.sequential)
    assert order is not None
    shorter = forward_backward_pass(problem, order)
    assert shorter is not None
    check(problem.schedule(shorter), costs, 5.0)
    assert (
        simulate(problem.schedule(shorter), costs).makespan
        < simulate(problem.sequential, costs).makespan
    )


@pytest.mark.parametrize("limit", [None, 5.0])
def test_ranks_that_choose_come_to_a_legal_order_in_both_directions_of_time(
    limit: float | None,
) -> None:
    """Random priorities lead to orders within memory, no longer than the dispatcher says."""
    generator = random.Random(7)
    costs = uneven(generator, 6, vocab_s=(0.2,) * 6, vocab_t=(0.3,) * 6)
    (problem,) = scheduling_problems(costs, 3, 6, limit, ["v"], False, 1)
    for backward in (False, True) * 3:
        priority = [generator.random() for _ in problem.inputs]
        result = Direction(problem, backward).dispatch(priority, generator.choice((0, 0.5, 1)))
        assert result is not None
        order = [passes[:: -1 if backward else 1] for passes in result.order]
        assert problem.fits(order)
        schedule = problem.schedule(order)
        check(schedule, costs, limit)
        assert simulate(schedule, costs).cost <= result.value * (1 + 1e-9)


SAMPLES = {
    "search_random": "--first 13 --settings 15 --passes 8",
    "search_authors": "--ranks 2 --microbatches 4 --profiles 1.5B --passes 8",
}


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize("script", SAMPLES)
def test_the_benchmarks_run_and_go_on_where_they_stopped(script: str, tmp_path: Path) -> None:
    file = Path(__file__).parents[3] / "examples" / "benchmarks" / f"{script}.py"
    spec = spec_from_file_location(script, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = tmp_path / "rows.jsonl"
    first = module.main([*SAMPLES[script].split(), "--output", str(rows)])
    written = rows.read_text()
    assert module.main([*SAMPLES[script].split(), "--output", str(rows)]) == first
    assert rows.read_text() == written
    for line in map(json.loads, written.splitlines()):
        assert line["bound"] <= line["found"] * (1 + 1e-9)
        assert line["found"] <= (line.get("best_name") or math.inf) * (1 + 1e-9)
