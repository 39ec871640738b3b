"""The search: named schedules and other starting orders, improved by turns and annealing, and its result."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import sub

from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.generators.registry import find
from zbcompile.schedules.ir.actions import has_pairs
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.schedules.searching.annealing import Annealer
from zbcompile.schedules.searching.justification import Justifier, turned_around
from zbcompile.schedules.searching.lower_bound import lower_bound
from zbcompile.schedules.searching.problem import HUGE, LARGE, ROUNDING, Problem, Words
from zbcompile.schedules.searching.search_budget import Budget, SearchProgress
from zbcompile.schedules.searching.starting_orders import HEURISTIC, named_orders, one_by_one
from zbcompile.schedules.simulation.timeline import Timeline, simulate

LEVELS = 6  # bisections of memory
ONE_BY_ONE, LEAN = "one microbatch after the other", "zb-1p"  # origins of orders in less memory
STARTS = 4  # orders of a placement to turn around
TURN = 6  # times as long as preparing for turns: the first turn
FIRST, GROWTH = 2000, 4  # moves of the first round, and how many times as many each further one has
TURNED = ((3, 0.1), (1, 0.25))  # placements whose orders are turned around, and for what share of a round's moves
ANNEALED, HARDLY = 0.65, 0.04  # the share in which the best order is annealed; HARDLY above HUGE passes


@dataclass(frozen=True, eq=False)
class Candidate:
    """An order of one problem, what it takes, and where it comes from."""

    problem: Problem = field(repr=False)
    value: float
    origin: str
    words: Words = field(repr=False)
    schedule: Schedule | None = field(default=None, repr=False)


@dataclass(frozen=True)
class SearchResult:
    """What a search has found.

    * `schedule`, called "auto", and its `simulation`; `bound`: no order of any admitted placement is shorter under the
      costs as they are;
    * `objective`: the makespan (without barrier the cost), `gap`: objective / bound - 1;
    * `origin`: the order that it was made from; `moves`: how many were tried, in how many `seconds`;
    * `names`: what every named schedule that fits takes, by name and placement;
    * `placements`: the bound of each placement, and the best order found on it;
    * `named`: what every named schedule that fits is on the same placement, the shortest first.
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

    @property
    def gap(self) -> float:
        return self.objective / self.bound - 1 if self.bound else 0.0

    @property
    def proven(self) -> bool:
        """Whether nothing can be shorter."""
        return self.objective <= self.bound * ROUNDING

    def __str__(self) -> str:
        left = "proven optimal" if self.proven else f"{float(self.gap):.1%} above the bound of {float(self.bound):.6g}"
        how = f"from {self.origin} by {self.moves} moves in {self.seconds:.1f} s"
        lines = [f"auto: {float(self.objective):.6g} on placement {self.schedule.placement}, {left}; {how}"]
        if self.names:
            (name, placement), value = min(self.names.items(), key=lambda item: item[1])
            longer = f", {float(value / self.objective) - 1:.1%} longer" if self.objective else ""
            lines.append(f"the best name, {name} on {placement}: {float(value):.6g}{longer}")
        else:
            lines.append("no named schedule fits")
        return "\n".join(lines)


class Hunt:
    """One search: the candidates, the bounds of the placements, and what is left of the budget."""

    def __init__(self, problems: Sequence[Problem], budget: Budget, seed: int) -> None:
        self.problems, self.budget, self.seed = problems, budget, seed
        self.bounds = {each: lower_bound(each, quick=budget.late) for each in problems}
        self.pool: list[Candidate] = []
        self.names: dict[tuple[str, str], float] = {}
        self.named: dict[Problem, list[tuple[float, Schedule]]] = {}
        self.progress = SearchProgress()

    def run(self) -> None:
        for problem in self.problems:
            if self.pool and self.budget.late:
                break
            self._take(problem, ONE_BY_ONE, one_by_one(problem))
            if problem in self._open():
                self._turn_around(problem, problem)  # before the names, which take seconds in large steps
            for named in named_orders(problem, self.budget):
                self._take(problem, *named)
        moves = FIRST
        while self._open() and not self.budget.over:
            before = self.budget.made
            for keep, share in TURNED:
                problems = list(dict.fromkeys(c.problem for c in self._ranked()))[:keep]
                for problem in problems:
                    self._justify(problem, moves * share / len(problems))
            for best in self._ranked()[:1]:
                self._improve(best, moves * (ANNEALED if len(best.problem.time) <= HUGE else HARDLY))
            if self.budget.made == before:
                break
            moves *= GROWTH

    def run_as_short(self) -> None:
        """Halve the memory of the shortest order again and again, as long as another one is as short."""
        if self.budget.late:
            return
        best = min(self._shortest(), key=_peak)
        whole, most = best.problem, _peak(best)
        least = max(peak_memory(whole.schedule(one_by_one(whole)), whole.costs))
        for _ in range(LEVELS):
            if self.budget.late or least >= most:
                return
            count, level = len(self.pool), (most + least) / 2
            lean = _within(whole, level)
            self._turn_around(whole, lean)
            for name, words, _ in named_orders(lean, families=[find(LEAN)]) if len(lean.time) <= LARGE else ():
                self._take(whole, f"{name} within less memory", words)
            alike = best.value / ROUNDING, best.value * ROUNDING  # a shorter one is for the search to find
            self.pool[count:] = [each for each in self.pool[count:] if alike[0] <= each.value <= alike[1]]
            if self.pool[count:]:
                most = min(map(_peak, self.pool[count:]))
            else:
                least = level

    def _turn_around(self, problem: Problem, within: Problem) -> None:
        """Take one microbatch after the other, turned around in the memory of `within`, if there is an order."""
        lean = one_by_one(within)
        words = turned_around(within, lean, lambda: self.budget.late) if within.fits(lean) else None
        if words is not None:
            self._take(problem, f"{ONE_BY_ONE}, turned around", words)

    def _open(self) -> list[Problem]:
        """The problems whose bound is not met."""
        best = min(candidate.value for candidate in self.pool)
        return [problem for problem in self.problems if best > self._target(problem)]

    def _target(self, problem: Problem) -> float:
        """The value that no order can improve on."""
        return self.bounds[problem] * ROUNDING

    def _take(self, problem: Problem, origin: str, words: Words, named: Schedule | None = None) -> None:
        """Add a candidate; of a named schedule that may have pairs, both with them and without."""
        if self.pool:
            self.progress.show(min(c.value for c in self.pool), min(self.bounds.values()), self.budget.spent)
        for schedule in (named, None) if named is not None else (None,):
            if schedule is None or any(map(has_pairs, schedule.orders)):  # an opened pair may be longer
                timeline = simulate(schedule or problem.schedule(words), problem.costs)
                value = timeline.makespan if problem.barrier else timeline.cost
                self.pool.append(Candidate(problem, value, origin, words, schedule))
                if named is not None:
                    key = origin, str(problem.placement)
                    self.names[key] = min(value, self.names.get(key, value))
                    self.named.setdefault(problem, []).append((value, named))

    def _ranked(self) -> list[Candidate]:
        """The candidates of open problems, the best first. Without those that a search with less time leaves out: with
        them, more time would lead elsewhere."""
        open_ = self._open()
        return sorted((c for c in self.pool if c.problem in open_ and c.origin not in HEURISTIC), key=lambda c: c.value)

    def _justify(self, problem: Problem, moves: float) -> None:
        distinct = {c.value: c for c in reversed(self._ranked()) if c.problem is problem}  # the best is the last
        starts = [*distinct.values()][: -STARTS - 1 : -1]
        if not starts or self.budget.over:
            return
        begun = self.budget.spent
        justifier = Justifier(problem, [c.words for c in starts], starts[0].value, self.seed + self.budget.made)
        origin = starts[0].origin.removesuffix(", turned around")
        self._run(justifier, moves, TURN * (self.budget.spent - begun), f"{origin}, turned around")

    def _improve(self, candidate: Candidate, moves: float) -> None:
        problem = candidate.problem
        if self.budget.over:
            return
        annealer = Annealer(problem, candidate.words, self.seed + self.budget.made)
        self._run(annealer, moves, 0, candidate.origin)

    def _run(self, worker: Justifier | Annealer, moves: float, first: float, origin: str) -> None:
        """Let it make `moves`, the first of which take `first` seconds to prepare, and take what it finds."""
        best, done = min(candidate.value for candidate in self.pool), self.budget.slice(moves, first)

        def progress(made: int) -> float:
            self.progress.show(best, min(self.bounds.values()), self.budget.spent)
            return done(made)

        try:
            self.budget.made += worker.run(progress, self._target(worker.problem))
        finally:
            if worker.best_words is not None:
                self._take(worker.problem, origin, worker.best_words)

    def _shortest(self) -> list[Candidate]:
        """The candidates that are as short as the shortest one."""
        least = min(candidate.value for candidate in self.pool)
        return [candidate for candidate in self.pool if candidate.value <= least * ROUNDING]

    def found(self) -> SearchResult:
        best = min(self._shortest(), key=_fullest)
        problem = best.problem
        simulation = simulate(_schedule_of(best), problem.costs)
        objective = simulation.makespan if problem.barrier else simulation.cost
        bound = min(self.bounds.values())
        if objective < bound <= objective * ROUNDING:  # sums differ in their last bits
            bound = objective
        on = {p: min(c.value for c in self.pool if c.problem is p) for p in {c.problem: None for c in self.pool}}
        placements = {str(p.placement): (self.bounds[p], value) for p, value in on.items()}
        made = best.origin, self.budget.made, self.budget.spent
        named = tuple(sorted(self.named.get(problem, ()), key=lambda each: each[0]))
        return SearchResult(simulation.schedule, simulation, bound, objective, *made, self.names, placements, named)


def _schedule_of(candidate: Candidate) -> Schedule:
    return replace(candidate.schedule or candidate.problem.schedule(candidate.words), name="auto")


def _peak(candidate: Candidate) -> float:
    """The most that a rank holds, on the fullest one."""
    return max(peak_memory(_schedule_of(candidate), candidate.problem.costs))


def _fullest(candidate: Candidate) -> float:
    """The most that a rank holds or, with limits, the most by which one exceeds its own (mostly negative)."""
    problem = candidate.problem
    peaks = peak_memory(_schedule_of(candidate), problem.costs)
    return max(map(sub, peaks, problem.limits or (0,) * len(peaks)))


def _within(problem: Problem, level: float) -> Problem:
    """The problem with no limit above `level`."""
    limits = problem.limits or (level,) * problem.placement.ranks
    return replace(problem, limits=tuple(min(limit, level) for limit in limits))
