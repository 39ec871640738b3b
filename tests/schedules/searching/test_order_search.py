"""The search: never longer than a name, never below the bound, the same again, and plain errors."""

import random

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


def uneven(generator: random.Random, stages: int, **options) -> Costs:
    """Stages that differ, and a heavy last one."""

    def drawn(low: float = 0.7, high: float = 1.3) -> tuple[float, ...]:
        return tuple(generator.uniform(low, high) for _ in range(stages))

    *forward, last = drawn()
    memory = {"activation": drawn(), "residue": drawn(0, 0.7), "comm": generator.choice((0, 0.2))}
    return Costs((*forward, 2 * last), drawn(), drawn(), **memory, **options)


@pytest.mark.parametrize("number", range(3))
def test_never_longer_than_a_name_and_never_below_the_bound(number: int) -> None:
    generator = random.Random(number)
    ranks, microbatches = generator.choice((2, 3, 4)), generator.randint(2, 9)
    barrier, costs = generator.random() < 0.5, uneven(generator, 2 * ranks)
    limit = generator.choice((None, 2.2 * ranks, 1.2 * ranks + 1.5))
    try:
        result = search(costs, ranks, microbatches, limit, barrier=barrier)
    except ScheduleError as error:
        assert "no order fits" in str(error)  # noqa: PT017 whether one fits is up to the draw
        return
    check(lower(result.schedule), result.simulation.costs, limit)
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
                takes = (step.makespan if barrier else step.cost) * (1 + 1e-9)
                least = bound(costs, ranks, microbatches, schedule.placement, limit, barrier)
                assert max(result.objective, least) <= takes


def test_the_same_arguments_find_the_same_order() -> None:
    costs = uneven(random.Random(3), 4)
    first, second = (search(costs, 2, 5, 4.5) for _ in range(2))
    assert first.schedule == second.schedule


def test_textbook_costs_are_proven_optimal() -> None:
    result = search(Costs.uniform(4), 4, 8, placements=["linear"])
    assert (result.objective, result.bound, result.proven, result.gap) == (27, 27, True, 0)
    assert "proven optimal" in str(result)
    nothing = search(Costs.uniform(2, 0, 0, 0), 2, 2, placements=["linear"], passes=0)
    assert "the best name" in str(nothing)  # a step that takes no time can be shown


def test_limits_may_differ_by_rank() -> None:
    limits = [3000, 2000, 1000]
    result = search(Costs.uniform(3, activation=1000), 3, 6, memory_limit=limits)
    peaks = result.simulation.peak_memory
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def test_vocabulary_passes_and_the_optimizer_count() -> None:
    costs = Costs.uniform(4, optimizer=2)
    passes = costs.forward, costs.backward, costs.weight
    shards = Costs(*passes, vocab_s=(0.5,) * 4, vocab_t=(0.5,) * 4, optimizer=(2,) * 4)
    plain, result = (search(of_model, 4, 6, placements=["linear"]) for of_model in (costs, shards))
    assert result.schedule.shards == (0, 1, 2, 3)
    check(lower(result.schedule), shards)
    assert plain.objective >= plain.bound == 6 * 3 + 3 + 2
    assert result.objective >= result.bound > plain.bound


def test_two_copies_only_on_request() -> None:
    costs = Costs.uniform(4)
    assert search(costs, 4, 8).schedule.placement.kind != "dual"
    check(lower(search(costs, 4, 8, placements=["dual"]).schedule), costs)


def test_of_equally_short_orders_the_one_that_holds_least_is_found() -> None:
    """The last stage takes so long that every name hides its bubble behind it, those too that hold
    twice as much."""
    passes = (tuple(share * time for time in (*[1.0] * 7, 1.8)) for share in (1, 1.05, 0.7))
    costs = Costs(*passes, activation=(1.0,) * 8, residue=(0.5,) * 8, comm=0.02)
    result = search(costs, 8, 32, placements=["linear"], passes=0)
    named = [build(name, 8, 32, costs) for name in ("zb-h1", "zb-2p")]
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
        ({"memory_limit": "80GiB"}, "memory_limit='80GiB'; expected a number"),
        ({"memory_limit": [8, 8, 8, float("nan")]}, "memory_limit=nan; expected"),
        ({"costs": Costs.uniform(6)}, "costs of 6 stages for 4 ranks; give a multiple of 4"),
        ({"placements": ["v", "w"]}, "placement 'w'; expected linear, looped:N"),
        ({"placements": ["looped"]}, "placement 'looped'; expected linear, looped:N"),
        ({"placements": []}, "placements is empty"),
        ({"placements": ["looped:3"]}, "cannot be merged into the 12 stages of placement looped:3"),
        ({"placements": "linear"}, r"placements='linear'; expected a list, such as \['linear'\]"),
        ({"ranks": 0}, "ranks=0; expected a whole number"),
    ],
)
def test_wrong_arguments(arguments: dict, message: str) -> None:
    usual = {"costs": Costs.uniform(8), "ranks": 4, "microbatches": 6, "passes": 1}
    with pytest.raises(ScheduleError, match=message):
        search(**{**usual, **arguments})
