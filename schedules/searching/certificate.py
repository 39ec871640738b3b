"""A second opinion on small cases: OR-Tools' CP-SAT solver proves an order optimal, or finds a shorter one.

Optional (`pip install ortools`). It knows nothing of the search but the order to start from.
"""

from dataclasses import dataclass
from typing import Any

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import Action, B, F, W
from zbcompile.schedules.searching.annealing import draws_of
from zbcompile.schedules.searching.clock import Clock, Order
from zbcompile.schedules.searching.problem import ROUNDING, Problem, Words

STEPS = 2**14  # of whole numbers in a mean pass: the solver knows no fractions


@dataclass(frozen=True)
class Certificate:
    """What the solver found in its time: no order is shorter than `bound`; `words` if it found some order."""

    bound: float
    optimal: bool
    words: Words | None


def certify(problem: Problem, start: Words | None = None, seconds: float = 60) -> Certificate:
    """Solve `problem` exactly as far as `seconds` allow; times are rounded down to 1/16384 of a mean pass.

    Raises `ScheduleError` without OR-Tools, and for costs with vocabulary passes or two model copies.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ScheduleError("a certificate needs OR-Tools; install it with `pip install ortools`") from error
    if problem.sharded or problem.placement.kind == "dual":
        raise ScheduleError("a certificate knows F, B and W on one copy of the model; leave out vocabulary and dual")
    model = _Model(cp_model.CpModel(), problem)
    if start is not None:
        model.hint(start)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model.model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    bound = solver.best_objective_bound / model.scale
    return Certificate(bound, status == cp_model.OPTIMAL, model.words(solver) if found else None)


class _Model:
    """The problem as intervals: one machine for each rank, precedences with delays, memory as a resource."""

    def __init__(self, model: Any, problem: Problem) -> None:
        self.model, self.problem = model, problem
        busy = sum(problem.time)
        self.scale = STEPS * len(problem.time) / busy if busy else 1.0
        self.time = [int(time * self.scale) for time in problem.time]
        slack = sum(int(delay * self.scale) for waits in problem.waits for _, delay in waits)
        self.horizon = sum(self.time) + slack + 1
        self.begin = [model.new_int_var(0, self.horizon, str(action)) for action in problem.actions]
        self._order()
        self._memory()
        self._objective()

    def _order(self) -> None:
        problem, model = self.problem, self.model
        intervals: list[list[Any]] = [[] for _ in range(problem.placement.ranks)]
        for n, rank in enumerate(problem.rank):
            intervals[rank].append(model.new_fixed_size_interval_var(self.begin[n], self.time[n], ""))
            for made, delay in problem.waits[n]:
                model.add(self.begin[n] >= self.begin[made] + self.time[made] + int(delay * self.scale))
            if n and problem.letter[n] == problem.letter[n - 1]:
                model.add(self.begin[n] >= self.begin[n - 1] + self.time[n - 1])
        for mine in intervals:
            model.add_no_overlap(mine)

    def _memory(self) -> None:
        problem, number = self.problem, self.problem.number
        for rank, limit in enumerate(problem.limits or ()):
            held, sizes = [], []
            for stage in problem.placement.stages_of(rank):
                size, left = problem.costs.activation[stage], problem.costs.residue[stage]
                for m in range(problem.microbatches):
                    f, b, w = (number[Action(op, stage, m)] for op in (F, B, W))
                    held += [self._between(f, b), self._between(b, w, from_end=True)]
                    sizes += [size, left]
            unit = 10**6 / max(limit, *sizes)
            self.model.add_cumulative(held, [int(size * unit) for size in sizes], int(limit * ROUNDING * unit) + 1)

    def _between(self, first: int, last: int, from_end: bool = False) -> Any:
        """From the begin (or the end) of one pass to the end of another."""
        begin = self.begin[first] + (self.time[first] if from_end else 0)
        end = self.begin[last] + self.time[last]
        return self.model.new_interval_var(begin, self.model.new_int_var(0, self.horizon, ""), end, "")

    def _objective(self) -> None:
        lowest = min(0, *(int(offset * self.scale) - 1 for offset in self.problem.offset))
        objective = self.model.new_int_var(lowest, 2 * self.horizon, "objective")
        for n, rank in enumerate(self.problem.rank):
            offset = int(self.problem.offset[rank] * self.scale // 1)
            self.model.add(objective >= self.begin[n] + self.time[n] + offset)
        self.model.minimize(objective)

    def hint(self, words: Words) -> None:
        clock = Clock(Order(self.problem, words), *draws_of(self.problem, None)[0])
        for n, begin in enumerate(self.begin):
            self.model.add_hint(begin, int((clock.end[n] - self.problem.time[n]) * self.scale))

    def words(self, solver: Any) -> Words:
        """The order of the begins; of equal ones, first passes without time, each after what it waits for."""
        words: Words = [[] for _ in range(self.problem.placement.ranks)]
        begin = [solver.value(each) for each in self.begin]
        for n in sorted(range(len(begin)), key=lambda n: (begin[n], self.time[n] > 0, self._turn(n))):
            words[self.problem.rank[n]].append(n)
        return words

    def _turn(self, n: int) -> tuple[int, int, int]:
        op, stage, m = self.problem.actions[n]
        return m, (F, B, W).index(op), stage if op == F else -stage
