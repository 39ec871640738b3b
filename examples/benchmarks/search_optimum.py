"""The searched order against proven optima: small instances, solved by OR-Tools' CP-SAT.

    python examples/benchmarks/search_optimum.py --instances 60 --seconds 60 --output optimum.jsonl

Instances have 2 to 4 ranks, 3 to 8 microbatches, linear or V placement, even or uneven stages,
ample or tight memory. Needs `pip install ortools`. What the file holds is not run again.
"""

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ortools.sat.python import cp_model
from tqdm import tqdm

from zbcompile.schedules import Costs, search
from zbcompile.schedules.ir.actions import Action, B, F, W
from zbcompile.schedules.searching.order_search import scheduling_problems
from zbcompile.schedules.searching.problem import ROUNDING, Order, SchedulingProblem

STEPS = 2**14  # of whole numbers in a mean pass: the solver knows no fractions
EQUAL = 1e-3  # the solver's whole numbers


def instance(number: int) -> dict[str, Any]:
    """The arguments of `search`."""
    rng = random.Random(number)
    ranks = rng.randint(2, 4)
    placement = rng.choice(("linear", "v"))
    chunks = 2 if placement == "v" else 1
    spread, hop = rng.choice((0.0, 0.3)), rng.choice((0.0, 0.2))

    def drawn(unit: float = 1 / chunks) -> tuple[float, ...]:
        return tuple(unit * rng.uniform(1 - spread, 1 + spread) for _ in range(ranks * chunks))

    costs = Costs(drawn(), drawn(), drawn(), activation=(1 / chunks,) * ranks * chunks, comm=hop)
    memory = rng.choice((None, ranks, max(chunks, 1 + ranks // 2)))
    return {
        "costs": costs,
        "ranks": ranks,
        "microbatches": rng.randint(3, 8 if placement == "linear" else 6),
        "memory_limit": memory,
        "placements": [placement],
        "barrier": rng.random() < 0.5,
    }


@dataclass(frozen=True)
class Certificate:
    """What the solver found in its time: no order is shorter than `bound`."""

    bound: float
    optimal: bool


def certify(problem: SchedulingProblem, start: Order, seconds: float) -> Certificate:
    """Solve `problem` exactly as far as `seconds` allow; times are rounded down to 1/16384 of a
    mean pass.

    It knows F, B and W on one copy of the model.
    """
    model = _Model(cp_model.CpModel(), problem)
    model.hint(start)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model.model)
    return Certificate(solver.best_objective_bound / model.scale, status == cp_model.OPTIMAL)


class _Model:
    """The problem as intervals: one machine for each rank, precedences with delays, memory as a
    resource."""

    def __init__(self, model: Any, problem: SchedulingProblem) -> None:
        self.model, self.problem = model, problem
        busy = sum(problem.time)
        self.scale = STEPS * len(problem.actions) / busy if busy else 1.0
        self.time = [int(time * self.scale) for time in problem.time[: len(problem.actions)]]
        slack = sum(int(delay * self.scale) for inputs in problem.inputs for _, delay in inputs)
        self.horizon = sum(self.time) + slack + 1
        self.begin = [model.new_int_var(0, self.horizon, str(action)) for action in problem.actions]
        self._order()
        self._memory()
        self._objective()

    def _order(self) -> None:
        problem, model = self.problem, self.model
        intervals: list[list[Any]] = [[] for _ in range(problem.placement.ranks)]
        for n, rank in enumerate(problem.rank):
            intervals[rank].append(
                model.new_fixed_size_interval_var(self.begin[n], self.time[n], "")
            )
            for made, delay in problem.inputs[n]:
                model.add(
                    self.begin[n] >= self.begin[made] + self.time[made] + int(delay * self.scale)
                )
            action = problem.actions[n]
            before = problem.number.get(action._replace(microbatch=action.microbatch - 1))
            if before is not None:
                model.add(self.begin[n] >= self.begin[before] + self.time[before])
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
            self.model.add_cumulative(
                held, [int(size * unit) for size in sizes], int(limit * ROUNDING * unit) + 1
            )

    def _between(self, first: int, last: int, from_end: bool = False) -> Any:
        """From the begin (or the end) of one pass to the end of another."""
        begin = self.begin[first] + (self.time[first] if from_end else 0)
        end = self.begin[last] + self.time[last]
        return self.model.new_interval_var(
            begin, self.model.new_int_var(0, self.horizon, ""), end, ""
        )

    def _objective(self) -> None:
        lowest = min(0, *(int(offset * self.scale) - 1 for offset in self.problem.offset))
        objective = self.model.new_int_var(lowest, 2 * self.horizon, "objective")
        for n, rank in enumerate(self.problem.rank):
            offset = int(self.problem.offset[rank] * self.scale // 1)
            self.model.add(objective >= self.begin[n] + self.time[n] + offset)
        self.model.minimize(objective)

    def hint(self, order: Order) -> None:
        for n, (begin, end) in enumerate(zip(self.begin, self.problem.ends(order), strict=True)):
            self.model.add_hint(begin, int((end - self.problem.time[n]) * self.scale))


def run(number: int, seconds: float) -> dict[str, Any]:
    given = instance(number)
    found = search(**given)
    (problem,) = scheduling_problems(**given, barriers=1)
    order = problem.order_of(found.schedule)
    assert order is not None, "what was found fits"
    proof = certify(problem, order, seconds)
    row = {
        name: given[name]
        for name in ("ranks", "microbatches", "memory_limit", "placements", "barrier")
    }
    figures = {"found": found.objective, "bound": found.bound}
    return {"number": number, **row, **figures, "solver": proof.bound, "optimal": proof.optimal}


def report(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    proven = [row for row in rows if row["optimal"]]
    worse = [row for row in proven if row["found"] > row["solver"] * (1 + EQUAL)]
    above = [row for row in proven if row["bound"] > row["solver"] * (1 + EQUAL)]
    own = sum(row["found"] <= row["bound"] * (1 + 1e-9) for row in rows)
    lines = [
        (
            f"{len(rows)} instances, {len(proven)} proven optimal by the solver, {own} by the bound"
            " alone"
        ),
        f"the search equals the optimum in {len(proven) - len(worse)} of {len(proven)}",
        f"the bound is above the optimum in {len(above)}",
    ]
    lines += [
        f"  instance {row['number']}: found {row['found']:.6g}, optimum {row['solver']:.6g}"
        for row in worse
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first instance (default: 0)"
    )
    parser.add_argument("--instances", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=60, help="for the solver")
    parser.add_argument("--output", type=Path, default=Path("search_optimum.jsonl"))
    options = parser.parse_args(arguments)
    lines = (
        options.output.read_text(encoding="utf-8").splitlines() if options.output.exists() else []
    )
    rows = {row["number"]: row for row in map(json.loads, lines)}
    asked = range(options.first, options.first + options.instances)
    with options.output.open("a", encoding="utf-8") as file:
        for number in tqdm([n for n in asked if n not in rows], disable=None):
            rows[number] = run(number, options.seconds)
            print(json.dumps(rows[number]), file=file, flush=True)
    text = report(rows[number] for number in asked if number in rows)
    print(text)
    return text


if __name__ == "__main__":
    main()
