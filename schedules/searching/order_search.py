"""Searches a short order for given costs: every named schedule that fits, improved by
forward-backward passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import sub
from typing import NamedTuple

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.generators.registry import FAMILIES, build_named
from zbcompile.schedules.generators.vocabulary_insertion import with_vocabulary
from zbcompile.schedules.ir.actions import has_pairs
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.placement import Placement, require_count
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.schedules.searching.forward_backward import (
    ForwardBackwardImprover,
    forward_backward_pass,
)
from zbcompile.schedules.searching.problem import ROUNDING, Order, SchedulingProblem, limits_of
from zbcompile.schedules.simulation.timeline import Timeline, simulate

SEQUENTIAL = "one microbatch after the other"
STARTS = 4  # orders that are improved
PASSES = 128  # forward-backward passes
V_PATIENCE = 0.8  # see `adapted`
LARGE = 10_000  # passes


class Candidate(NamedTuple):
    """An order of a problem, what it takes, the name or order that it was made from, and its
    schedule."""

    value: float
    problem: SchedulingProblem
    origin: str
    order: Order
    schedule: Schedule


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    * `schedule`, called "auto", and its `simulation`;
    * `objective`: its makespan (without barrier its cost), `bound`: no order of any admitted
      placement is shorter, `gap`: objective / bound - 1;
    * `origin`: the order that it was made from;
    * `best_name`: the shortest named schedule that fits, with its objective; None if none fits.
    """

    schedule: Schedule
    simulation: Timeline
    bound: float
    objective: float
    origin: str
    best_name: tuple[str, float] | None

    @property
    def gap(self) -> float:
        return self.objective / self.bound - 1 if self.bound else 0.0

    @property
    def proven(self) -> bool:
        """True if the order meets the bound, so that none is shorter."""
        return self.objective <= self.bound * ROUNDING

    def __str__(self) -> str:
        gap = f"{float(self.gap):.1%} above the bound of {float(self.bound):.6g}"
        left = "proven optimal" if self.proven else gap
        text = f"auto: {float(self.objective):.6g} on placement {self.schedule.placement}, {left}"
        name, value = self.best_name or ("none fits", 0)
        return f"{text}; from {self.origin}\nthe best name, {name}: {float(value):.6g}"


def search(
    costs: Costs,
    ranks: int,
    microbatches: int,
    memory_limit: float | Sequence[float] | None = None,
    placements: Sequence[str | Placement] | None = None,
    barrier: bool = True,
    barriers: int = 1,
    passes: int = PASSES,
) -> SearchResult:
    """Searches a short order of `microbatches` on `ranks`; the same arguments find the same order.

    `costs` are those of the whole model cut into the largest number of stages that may be used,
    merged for fewer. `placements` ("linear", "looped:2", "v", ...) are all that the costs allow by
    default; "dual", which keeps two copies of every stage, only on request. `memory_limit` is one
    number or one for each rank, in the unit of `costs.activation`. With `barrier` the makespan
    counts, else the cost. `barriers` is that of `with_vocabulary`, for costs with S and T. `passes`
    is the number of forward-backward passes.

    Ties are broken by peak memory. Raises `ScheduleError` if nothing fits, and for costs or
    placements that do not fit the ranks.

    >>> from zbcompile.schedules import Costs, search
    >>> found = search(Costs.uniform(2), ranks=2, microbatches=4, placements=["linear"])
    >>> found.objective, found.bound, found.proven
    (13, 13, True)
    """
    problems = scheduling_problems(
        costs, ranks, microbatches, memory_limit, placements, barrier, barriers
    )
    bounds = {problem: problem.lower_bound() for problem in problems}
    named = [candidate for problem in problems for candidate in _named(problem)]
    candidates = named + [candidate for problem in problems for candidate in _sequential(problem)]
    # half of the passes for the best four, half for the best two of all
    for starts, share in ((STARTS, 8), (2, 4)):
        for seed, (value, problem, origin, order, _) in enumerate(
            _starts(candidates)[:starts], starts
        ):
            improver = ForwardBackwardImprover(problem, order, value, seed)
            improver.run(passes // share, bounds[problem] * ROUNDING)
            if improver.best_order is not None:
                candidates.append(_candidate(problem, origin, improver.best_order))
    shortest = min(candidate.value for candidate in candidates) * ROUNDING
    best = min((candidate for candidate in candidates if candidate.value <= shortest), key=_excess)
    simulation = simulate(replace(best.schedule, name="auto"), best.problem.costs)
    first = min(named, key=lambda candidate: candidate.value, default=None)
    return SearchResult(
        simulation.schedule,
        simulation,
        min(bounds.values()),
        best.value,
        best.origin,
        first and (first.schedule.name, first.value),
    )


def bound(
    costs: Costs,
    ranks: int,
    microbatches: int,
    placement: str | Placement,
    memory_limit: float | Sequence[float] | None = None,
    barrier: bool = True,
    barriers: int = 1,
) -> float:
    """Returns what no order on this placement can be shorter than: its makespan, without `barrier`
    its cost.

    Arguments and errors as of `search`.

    >>> from zbcompile.schedules import Costs, bound
    >>> bound(Costs.uniform(4), ranks=4, microbatches=8, placement="linear")
    27
    """
    problems = scheduling_problems(
        costs, ranks, microbatches, memory_limit, (placement,), barrier, barriers
    )
    return problems[0].lower_bound()


def scheduling_problems(
    costs: Costs,
    ranks: int,
    microbatches: int,
    memory_limit: float | Sequence[float] | None,
    placements: Sequence[str | Placement] | None,
    barrier: bool,
    barriers: int,
) -> list[SchedulingProblem]:
    """Returns one problem for each placement whose memory suffices; raises `ScheduleError` if there
    is none."""
    require_count("ranks", ranks)
    require_count("microbatches", microbatches)
    limits, problems, reasons = limits_of(memory_limit, ranks), [], []
    if isinstance(placements, str):
        raise ScheduleError(
            f"placements={placements!r:.80}; expected a list, such as [{placements!r:.80}]"
        )
    if placements is None:
        if costs.stages % ranks:
            counts = f"costs of {costs.stages} stages for {ranks} ranks"
            raise ScheduleError(f"{counts}; give a multiple of {ranks} stages")
        chunks = costs.stages // ranks
        placements = [f"looped:{v}" for v in range(2, chunks + 1) if chunks % v == 0]
        placements = ["linear", *placements, *["v"] * (chunks % 2 == 0)]
    if not placements:
        raise ScheduleError("placements is empty; name some, such as linear and v, or leave it out")
    for name in placements:
        placement = Placement.parse(name, ranks) if isinstance(name, str) else name
        if placement.ranks != ranks:
            raise ScheduleError(
                f"placement {placement} is for {placement.ranks} ranks, but there are {ranks}"
            )
        if costs.stages % placement.stages:
            merged = f"merged into the {placement.stages} stages of placement {name}"
            hint = f"give costs for a multiple of {placement.stages} stages"
            raise ScheduleError(f"costs of {costs.stages} stages cannot be {merged}; {hint}")
        resized = costs.resized(placement.stages)
        problem = SchedulingProblem(placement, microbatches, resized, limits, barrier, barriers)
        if reason := problem.missing_memory():
            reasons.append(reason)
        else:
            problems.append(problem)
    if not problems:
        raise ScheduleError("\n  ".join(("memory_limit: no order fits", *reasons)))
    return problems


def _named(problem: SchedulingProblem) -> Iterator[Candidate]:
    """Yields every named schedule of a placement that fits into its limits, with pairs and with
    pairs opened."""
    placement, limit = problem.placement, min(problem.limits) if problem.limits else None
    for family in FAMILIES:
        if family.placement == placement.kind:
            try:
                counts = placement.ranks, problem.microbatches
                schedule = build_named(family, *counts, problem.costs, limit, placement.chunks)
                schedule = adapted(schedule, problem.costs)
                if problem.sharded:
                    schedule = with_vocabulary(schedule, problem.sequential.barriers, problem.costs)
            except ScheduleError:  # it does not admit these counts, or does not fit
                continue
            order = problem.order_of(schedule)
            if order is not None:
                yield _candidate(problem, family.name, order, schedule)
                if any(map(has_pairs, schedule.orders)):
                    yield _candidate(problem, family.name, order)


def adapted(schedule: Schedule, costs: Costs) -> Schedule:
    """Returns a named schedule in a V after one forward-backward pass under `costs`.

    V orders are made for equal times. The schedule is returned unchanged if the pass does not
    shorten it in both objectives within its memory, and if it is large.
    """
    if (
        schedule.placement.kind != "v"
        or schedule.ranks == 1
        or sum(map(len, schedule.orders)) > LARGE
    ):
        return schedule
    costs = replace(costs, vocab_s=(), vocab_t=())
    limits = (max(peak_memory(schedule, costs)),) * schedule.ranks
    problem = SchedulingProblem(schedule.placement, schedule.microbatches, costs, limits)
    order = problem.order_of(schedule)
    again = order and forward_backward_pass(problem, order, V_PATIENCE)
    if not again:
        return schedule
    improved = replace(problem.schedule(again), name=schedule.name)
    before, after = simulate(schedule, costs), simulate(improved, costs)
    return improved if after.makespan < before.makespan and after.cost < before.cost else schedule


def _candidate(
    problem: SchedulingProblem, origin: str, order: Order, schedule: Schedule | None = None
) -> Candidate:
    schedule = schedule or problem.schedule(order)
    step = simulate(schedule, problem.costs)
    return Candidate(
        step.makespan if problem.barrier else step.cost, problem, origin, order, schedule
    )


def _excess(candidate: Candidate) -> float:
    """Returns the most that a rank holds or, with limits, the most by which one exceeds its own
    (mostly negative)."""
    peaks = peak_memory(candidate.schedule, candidate.problem.costs)
    return max(map(sub, peaks, candidate.problem.limits or (0,) * len(peaks)))


def _sequential(problem: SchedulingProblem) -> Iterator[Candidate]:
    """Yields one microbatch after the other, and that order after one forward-backward pass."""
    order = problem.order_of(problem.sequential)
    assert order is not None
    yield _candidate(problem, SEQUENTIAL, order)
    improved = forward_backward_pass(problem, order)
    if improved is not None:
        yield _candidate(problem, SEQUENTIAL, improved)


def _starts(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the best orders that differ in length, at least the best of each of the best
    placements."""
    distinct: dict[tuple[SchedulingProblem, float], Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.value):
        distinct.setdefault((candidate.problem, candidate.value), candidate)
    first = {candidate.problem: candidate for candidate in reversed(distinct.values())}
    ranked = sorted(
        distinct.values(), key=lambda start: (start is not first[start.problem], start.value)
    )
    return ranked[:STARTS]
