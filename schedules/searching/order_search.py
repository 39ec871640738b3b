"""From costs to an order: placements, seeds, annealing, and how far from the best the result can be."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import sub
from typing import NamedTuple

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.execution.noise import Noise, as_noise
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.placement import Placement, is_amount
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.schedules.searching.annealing import HUGE, MANY, Annealer, draws_of
from zbcompile.schedules.searching.justification import Justifier
from zbcompile.schedules.searching.lower_bound import lower_bound
from zbcompile.schedules.searching.problem import Problem, Words
from zbcompile.schedules.searching.question import problems_of
from zbcompile.schedules.searching.starting_orders import RULES, Seed, dispatched, named_seeds, one_by_one
from zbcompile.schedules.simulation.timeline import Timeline, simulate

SEEDS = 0.2  # share of the seconds for orders to start from


class Progress:
    """One line on a terminal that says how far a search is; nothing elsewhere."""

    def __init__(self) -> None:
        self.shown, self.due = sys.stderr.isatty(), 0.0

    def show(self, best: float, bound: float, spent: float) -> None:
        if self.shown and spent >= self.due:
            self.due = spent + 0.5
            left = f", {best / bound - 1:.1%} above the bound" if bound > 0 else ""
            print(f"\rsearch: {best:.6g}{left}, {spent:.0f} s ", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.shown and self.due:
            print(file=sys.stderr)


class Budget:
    """So many seconds from now on, and so many moves (`None`: as many as fit)."""

    def __init__(self, seconds: float, moves: int | None) -> None:
        self.start, self.seconds, self.moves = time.monotonic(), seconds, moves
        self.used = 0.0  # share

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    def seeds_spent(self, tried: int) -> bool:
        """Whether so many rules are enough; a rule is worth some hundred moves."""
        return self.spent > SEEDS * self.seconds or (self.moves is not None and tried * 100 > self.moves)

    @property
    def over(self) -> bool:
        return self.spent >= self.seconds

    def slice(self, share: float, each: float = 0.0) -> Callable[[int], float]:
        """How much of a share of what is left for moves is done, by the moves made. It is asked before each round of
        them, and ends what another round would carry beyond the seconds; the first one takes about `each`."""
        begin = before = self.spent
        if not self.used:
            self.rest = max(0.0, self.seconds - begin)
        self.used += share
        until = self.seconds - self.rest * (1 - min(1, self.used))
        moves = None if self.moves is None else max(1, round(self.moves * share))

        def done(made: int) -> float:
            nonlocal before, each
            now = self.spent
            before, each = now, now - before if made else each
            if now >= until or now + each > self.seconds:
                return 1.0
            return (now - begin) / (until - begin) if moves is None else made / moves

        return done


EXACT = 1 + 1e-9  # objectives count as equal up to rounding
STARTS = 4  # orders of a placement to turn around
TURN = 6  # so many times what preparing for turns takes, the first one does


class Effort(NamedTuple):
    """How the budget is spent on steps of up to so many passes."""

    passes: float
    turns: Sequence[tuple[int, float]]  # placements whose orders are turned around, share of the budget
    rounds: Sequence[tuple[int, float, float]]  # orders that are annealed, share of the budget, warmth


TURNS = ((8, 0.15), (2, 0.2))
EFFORTS = (
    Effort(MANY, TURNS, ((8, 0.15, 1.0), (3, 0.2, 0.7), (1, 0.15, 1.0), (1, 0.15, 0.3))),
    Effort(HUGE, TURNS, ((3, 0.2, 1.0), (1, 0.45, 0.7))),
    Effort(math.inf, ((2, 0.4), (1, 0.5)), ((1, 0.1, 0.7),)),  # there a move gains next to nothing
)


@dataclass(frozen=True, eq=False)
class Candidate:
    """An order of one problem, what it takes, and where it comes from."""

    problem: Problem = field(repr=False)
    value: float
    origin: str
    words: Words = field(repr=False)
    schedule: Schedule | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Found:
    """What a search has found.

    * `schedule`, called "auto", and its `simulation`; `bound`: no order of any admitted placement is shorter under the
      costs as they are;
    * `objective`: the makespan (without barrier the cost; with noise their quantile), `gap`: objective / bound - 1;
    * `origin`: the order that it was made from; `moves`: how many were tried, in so many `seconds`;
    * `names`: what every named schedule that fits takes, by name and placement;
    * `placements`: the bound of each placement, and the best order found on it;
    * `named`: what every named schedule that fits is on the same placement, the shortest first (of a search that
      was read from a file only those that come close to it).
    """

    schedule: Schedule
    simulation: Timeline
    bound: float
    objective: float
    origin: str
    moves: int
    seconds: float
    names: dict[tuple[str, str], float]
    placements: dict[str, tuple[float, float]]
    named: tuple[tuple[float, Schedule], ...] = field(default=(), repr=False, compare=False)

    def improved(self, problem: Problem, words: Words, origin: str) -> "Found":
        """The same with another order."""
        simulation = simulate(problem.schedule(words), problem.costs, self.simulation.noise)
        objective = simulation.quantile(problem.barrier)
        return replace(self, schedule=simulation.schedule, simulation=simulation, objective=objective, origin=origin)

    @property
    def gap(self) -> float:
        return self.objective / self.bound - 1 if self.bound else 0.0

    @property
    def proven(self) -> bool:
        """Whether nothing can be shorter; never under noise, which the bound does not know."""
        return self.simulation.noise is None and self.objective <= self.bound * EXACT

    def __str__(self) -> str:
        left = "proven optimal" if self.proven else f"{self.gap:.1%} above the bound of {self.bound:.6g}"
        how = f"from {self.origin} by {self.moves} moves in {self.seconds:.1f} s"
        lines = [f"auto: {self.objective:.6g} on placement {self.schedule.placement}, {left}; {how}"]
        if self.names:
            (name, placement), value = min(self.names.items(), key=lambda item: item[1])
            longer = f", {value / self.objective - 1:.1%} longer" if self.objective else ""
            lines.append(f"the best name, {name} on {placement}: {value:.6g}{longer}")
        else:
            lines.append("no named schedule fits")
        return "\n".join(lines)


def search(
    costs: Costs | Callable[[int], Costs],
    ranks: int,
    microbatches: int,
    memory_limit: float | Sequence[float] | None = None,
    placements: Sequence[str | Placement] | None = None,
    barrier: bool = True,
    seconds: float = 20,
    moves: int | None = None,
    seed: int = 0,
    noise: Noise | float | None = None,
    barriers: int = 1,
) -> Found:
    """Search the shortest order of `microbatches` on `ranks`, and say how far from the best it can be.

    `costs` are those of the whole model cut into the largest number of stages that may be used, merged for fewer, or a
    function from a number of stages to costs. `placements` ("linear", "looped:2", "v", ...) are all that the costs
    allow by default; "dual", which keeps two copies of every stage, only on request. `memory_limit` is one number or
    one for each rank, in the unit of `costs.activation`. With `barrier` the makespan counts, else the cost; with
    `noise` their quantile over drawn times. `barriers` is that of `with_vocabulary`, for costs with S and T.

    Of equally short orders it finds the one whose fullest rank holds least. It stops when the bound is met, after
    `moves` tried changes (0: the best of names and a rule) or after `seconds`; the same seed and number of moves find
    the same order if the seconds suffice. Ctrl-C returns the best so far. Raises `ScheduleError` if nothing fits, and
    for costs or placements that do not fit the ranks.

    >>> from zbcompile.schedules import Costs, search
    >>> found = search(Costs.uniform(2), ranks=2, microbatches=4, placements=["linear"], moves=1000)
    >>> found.objective, found.bound, found.proven
    (13, 13, True)
    """
    if not is_amount(seconds):
        raise ScheduleError(f"seconds={seconds!r:.80}; expected a finite number that is not negative")
    if moves is not None and not (isinstance(moves, int) and is_amount(moves)):
        raise ScheduleError(f"moves={moves!r:.80}; expected a whole number from 0 on, or None")
    problems = problems_of(costs, ranks, microbatches, memory_limit, placements, barrier, barriers)
    hunt = _Hunt(problems, Budget(seconds, moves), seed, as_noise(noise))
    try:
        hunt.run()
    except KeyboardInterrupt:
        if not hunt.pool:
            raise
    finally:
        hunt.progress.end()
    return hunt.found()


def bound(
    costs: Costs | Callable[[int], Costs],
    ranks: int,
    microbatches: int,
    placement: str | Placement,
    memory_limit: float | Sequence[float] | None = None,
    barrier: bool = True,
    barriers: int = 1,
) -> float:
    """What no order on this placement can be shorter than: its makespan, without `barrier` its cost.

    Arguments and errors as of `search`.

    >>> from zbcompile.schedules import Costs, bound
    >>> bound(Costs.uniform(4), ranks=4, microbatches=8, placement="linear")
    27
    """
    (problem,) = problems_of(costs, ranks, microbatches, memory_limit, (placement,), barrier, barriers)
    return lower_bound(problem)


class _Hunt:
    """One search: the candidates, the bounds of the placements, and what is left of the budget."""

    def __init__(self, problems: Sequence[Problem], budget: Budget, seed: int, noise: Noise | None) -> None:
        self.problems, self.budget, self.seed, self.noise = problems, budget, seed, noise
        self.bounds = {problem: lower_bound(problem) for problem in problems}
        self.draws = {problem: draws_of(problem, noise) for problem in problems}
        self.pool: list[Candidate] = []
        self.names: dict[tuple[str, str], float] = {}
        self.named: dict[Problem, list[tuple[float, Schedule]]] = {}
        self.moves = 0
        self.progress = Progress()

    def run(self) -> None:
        for problem in self.problems:
            self._take(problem, Seed("one microbatch after the other", one_by_one(problem)))
            for seed in named_seeds(problem):
                self._take(problem, seed)
                if self.budget.over:
                    break
        for number, rule in enumerate(RULES):
            if self.budget.seeds_spent(number):
                break
            for problem in [] if self.budget.over else self._open():
                if (found := dispatched(problem, rule)) is not None:
                    self._take(problem, found)
        if self.budget.moves == 0:
            return
        largest = max(len(problem.time) for problem in self.problems)
        effort = next(effort for effort in EFFORTS if largest <= effort.passes)
        for keep, share in effort.turns:
            problems = list(dict.fromkeys(c.problem for c in self._ranked()))[:keep]
            for problem in problems:
                self._justify(problem, share / len(problems))
        for keep, share, warmth in effort.rounds:
            chosen = self._chosen(keep)
            for candidate in chosen:
                self._improve(candidate, share / len(chosen), warmth)

    def _open(self) -> list[Problem]:
        """The problems whose bound is not met."""
        best = min(candidate.value for candidate in self.pool)
        return [problem for problem in self.problems if best > self._target(problem)]

    def _target(self, problem: Problem) -> float:
        """What cannot be improved on; under noise nothing is known of it."""
        return self.bounds[problem] * EXACT if self.noise is None else 0.0

    def _take(self, problem: Problem, seed: Seed) -> None:
        if self.pool:
            self.progress.show(min(c.value for c in self.pool), min(self.bounds.values()), self.budget.spent)
        for schedule in (seed.schedule, None):
            if schedule is None or problem.costs.overlap or problem.costs.pairs:  # else a pair opened is no longer
                timeline = simulate(schedule or problem.schedule(seed.words), problem.costs, self.noise)
                value = timeline.quantile(problem.barrier)
                self.pool.append(Candidate(problem, value, seed.origin, seed.words, schedule))
                if seed.schedule is not None:
                    key = seed.origin, str(problem.placement)
                    self.names[key] = min(value, self.names.get(key, value))
                    self.named.setdefault(problem, []).append((value, seed.schedule))

    def _chosen(self, count: int) -> list[Candidate]:
        """The best candidates of open problems, each with another order, half of them the best of their placement."""
        distinct = self._ranked()
        leaders = list({c.problem: c for c in reversed(distinct)}.values())
        leaders.sort(key=lambda c: c.value)
        return list(dict.fromkeys((*leaders[: count // 2], *distinct)))[:count]

    def _ranked(self) -> list[Candidate]:
        """The candidates of open problems, each with another order, the best first."""
        open_ = self._open()
        ranked = sorted((c for c in self.pool if c.problem in open_), key=lambda c: c.value)
        return list({(c.value, c.problem): c for c in reversed(ranked)}.values())[::-1]

    def _justify(self, problem: Problem, share: float) -> None:
        starts = [c for c in self._ranked() if c.problem is problem][:STARTS]
        if not starts or self.budget.over:
            return
        begun = self.budget.spent
        justifier = Justifier(problem, [c.words for c in starts], starts[0].value, self.seed + self.moves)
        done = self.budget.slice(share, TURN * (self.budget.spent - begun))
        try:
            self.moves += justifier.run(self._shown(done), self._target(problem))
        finally:
            if justifier.best_words is not None:
                origin = f"{starts[0].origin}, turned around"
                self._take(problem, Seed(origin, justifier.best_words))

    def _improve(self, candidate: Candidate, share: float, warmth: float) -> None:
        problem = candidate.problem
        if self.budget.over:
            return
        quantile = self.noise.quantile if self.noise else 1
        annealer = Annealer(problem, candidate.words, self.draws[problem], quantile, self.seed + self.moves)
        try:
            self.moves += annealer.run(self._shown(self.budget.slice(share)), self._target(problem), warmth)
        finally:
            if annealer.best < candidate.value:
                words = annealer.best_words
                self.pool.append(Candidate(problem, annealer.best, candidate.origin, words))

    def _shown(self, done: Callable[[int], float]) -> Callable[[int], float]:
        """The same, with progress shown on the way."""
        best = min(candidate.value for candidate in self.pool)

        def shown(made: int) -> float:
            self.progress.show(best, min(self.bounds.values()), self.budget.spent)
            return done(made)

        return shown

    def _shortest(self) -> list[Candidate]:
        """The candidates that are as short as the shortest one."""
        least = min(candidate.value for candidate in self.pool)
        return [candidate for candidate in self.pool if candidate.value <= least * EXACT]

    def found(self) -> Found:
        best = min(self._shortest(), key=_fullest)
        problem = best.problem
        schedule = best.schedule or problem.schedule(best.words)
        simulation = simulate(replace(schedule, name="auto"), problem.costs, self.noise)
        objective = simulation.quantile(problem.barrier)
        bound = min(self.bounds.values())
        if objective < bound <= objective * EXACT and self.noise is None:  # sums differ in their last bits
            bound = objective
        on = {p: min(c.value for c in self.pool if c.problem is p) for p in {c.problem: None for c in self.pool}}
        placements = {str(p.placement): (self.bounds[p], value) for p, value in on.items()}
        made = best.origin, self.moves, self.budget.spent
        named = tuple(sorted(self.named.get(problem, ()), key=lambda each: each[0]))
        return Found(simulation.schedule, simulation, bound, objective, *made, self.names, placements, named)


def _fullest(candidate: Candidate) -> float:
    """What the fullest rank holds; with limits, how far beyond its limit (so mostly negative)."""
    problem = candidate.problem
    peaks = peak_memory(candidate.schedule or problem.schedule(candidate.words), problem.costs)
    return max(map(sub, peaks, problem.limits or (0,) * len(peaks)))
