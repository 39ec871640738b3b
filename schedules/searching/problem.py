"""The problem of a search: the passes of a step as numbers, what each waits for, and what the ranks may hold.

It is a view of the order graph of the sequential order, in which every microbatch runs alone. Passes of one operation
and stage run in order of their microbatches: where stages are alike for all microbatches, as the costs say, no other
order is shorter, and weight gradients must accumulate in this one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.deadlock import run_to_end
from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.execution.order_graph import OrderGraph
from zbcompile.schedules.generators.list_scheduler import sequential_order
from zbcompile.schedules.generators.registry import require_limit
from zbcompile.schedules.ir.actions import BW, Action, B, F, S, T, W, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.ir.schedule import Schedule

ROUNDING = 1 + 1e-9  # sums of sizes, or of times, count as equal up to rounding
Order = list[list[int]]  # by rank, the passes in the order in which it runs them


class SchedulingProblem:
    """`microbatches` on `placement` under `costs`, within `limits` (one per rank, `None`: none).

    `barrier`: the objective is the makespan, else the longest own span of a rank. By pass: its action, rank and time,
    what it adds to the memory of its rank, and in `inputs` what it waits for and how long that travels; the numbers
    behind those of the passes stand for "every shard has run it".
    """

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        limits: tuple[float, ...] | None = None,
        barrier: bool = True,
        barriers: int = 1,
    ) -> None:
        self.placement, self.costs, self.limits, self.barrier = placement, costs, limits, barrier
        self.sharded = any((*costs.vocab_s, *costs.vocab_t))
        self.sequential = sequential_order(placement, microbatches, barriers if self.sharded else 0)
        graph = OrderGraph(self.sequential)
        delays, passes = graph.delays(costs), graph.first[-1]
        self.actions = flatten(graph.steps[:passes])
        self.rank = [rank for rank in range(placement.ranks) for _ in graph.nodes(rank)]
        self.time = graph.times(costs)
        added = {op: costs.added(op) for op in (F, B, W, S, T)}
        self.added = [added[op][stage] for op, stage, _ in self.actions]
        self.inputs = [tuple((made, delays[link]) for made, link in inputs) for inputs in graph.inputs]
        self.users: list[list[tuple[int, float]]] = [[] for _ in self.inputs]
        for user, inputs in enumerate(self.inputs):
            for made, delay in inputs:
                self.users[made].append((user, delay))
        self.number = {action: n for n, action in enumerate(self.actions)}
        self.heads = self._heads()
        self.offset = self._offsets()
        total = sum(self.time) + sum(map(abs, self.added)) + sum(sum(d for _, d in inputs) for inputs in self.inputs)
        if not 2 * total < math.inf:
            sums = f"placement {placement}: the times, or the bytes, of all passes add up"
            raise ScheduleError(f"{sums} to more than a float can be; give costs in a larger unit")

    @property
    def microbatches(self) -> int:
        return self.sequential.microbatches

    def _heads(self) -> list[float]:
        """Returns the earliest start of every pass if ranks could run any number of passes at once."""
        heads: list[float] = [0] * len(self.inputs)
        missing = [len(inputs) for inputs in self.inputs]
        ready = [n for n, count in enumerate(missing) if not count]
        for n in ready:
            for user, delay in self.users[n]:
                heads[user] = max(heads[user], heads[n] + self.time[n] + delay)
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
        self._topological = ready
        return heads

    def _offsets(self) -> list[float]:
        """Returns by rank what is added to the end of its last pass; the largest of these sums is the objective."""
        ranks = range(self.placement.ranks)
        optimizer = [sum(self.costs.optimizer[s] for s in self.placement.stages_of(rank)) for rank in ranks]
        if self.barrier:
            return [max(optimizer)] * len(ranks)
        starts = [min(h for h, r in zip(self.heads, self.rank, strict=False) if r == rank) for rank in ranks]
        return [time - start for time, start in zip(optimizer, starts, strict=True)]

    def order_of(self, schedule: Schedule) -> Order | None:
        """Returns the order of a schedule with pairs and BW opened; None if the memory does not hold it."""
        order = [self._numbered(flatten(steps), rank) for rank, steps in enumerate(schedule.orders)]
        return order if self.fits(order) else None

    def _numbered(self, actions: Sequence[Action], rank: int) -> list[int]:
        reached: dict[tuple[str, int], int] = {}
        numbers: list[int] = []
        for op, stage, _ in actions:
            second_copy = self.placement.rank(stage) != rank
            for each in (B, W) if op == BW else (op,):
                m = reached.get((each, stage), self.microbatches // 2 if second_copy else 0)
                reached[each, stage] = m + 1
                numbers.append(self.number[Action(each, stage, m)])
        return numbers

    def fits(self, order: Order) -> bool:
        """Whether no rank exceeds its limit."""
        return self.limits is None or all(
            max(accumulate(map(self.added.__getitem__, own)), default=0) <= limit * ROUNDING
            for own, limit in zip(order, self.limits, strict=True)
        )

    def schedule(self, order: Order) -> Schedule:
        """Returns the schedule, called "auto", that runs an order."""
        orders = tuple(tuple(map(self.actions.__getitem__, own)) for own in order)
        return replace(self.sequential, orders=orders)

    def ends(self, order: Order) -> list[float]:
        """Returns the end of every pass of an order."""
        graph, run = run_to_end(self.schedule(order), self.costs)
        ends: list[float] = [0] * len(self.actions)
        for node, action in enumerate(flatten(graph.steps[: graph.first[-1]])):
            ends[self.number[action]] = run.end[node]
        return ends

    def lower_bound(self) -> float:
        """Returns the textbook bound: what precedes a rank's first pass, its work, and what follows its last pass.

        Within limits also: the memory that microbatches hold, times the time that they hold it, divided by the limit.
        """
        tails = self._tails()
        found: list[float] = []
        for rank in range(self.placement.ranks):
            own = [n for n, r in enumerate(self.rank) if r == rank]
            around = min(self.heads[n] for n in own) + min(tails[n] for n in own)
            found.append(around + sum(self.time[n] for n in own))
            limit = self.limits[rank] if self.limits else 0
            if limit and math.isfinite(area := sum(map(self._held, own))):
                found.append(around + area / (limit * ROUNDING))
        return max(found)

    def _held(self, n: int) -> float:
        """Returns the memory of a forward times the least time until its backward ends; for a W, its residue's."""
        op, stage, m = self.actions[n]
        if op == F:
            backward = self.number[Action(B, stage, m)]
            return self.costs.activation[stage] * (self.heads[backward] + self.time[backward] - self.heads[n])
        return self.costs.residue[stage] * self.time[n] if op == W else 0

    def _tails(self) -> list[float]:
        """Returns the least that follows the end of every pass until the objective."""
        tails: list[float] = [self.offset[rank] for rank in self.rank]
        tails += [-math.inf] * (len(self.inputs) - len(tails))
        for n in reversed(self._topological):
            tails[n] = max([tails[n], *(tails[user] + self.time[user] + delay for user, delay in self.users[n])])
        return tails


def require_fit(problem: SchedulingProblem) -> None:
    """Raises `ScheduleError` if not even one microbatch at a time fits, with the rank and what is missing."""
    needs = [*map(float, peak_memory(problem.sequential, problem.costs))]
    limits = [*map(float, problem.limits or needs)]
    rank = max(range(len(limits)), key=lambda r: needs[r] - limits[r] * ROUNDING)
    if needs[rank] > limits[rank] * ROUNDING:
        unit = f" {problem.costs.memory_unit}" if problem.costs.memory_unit else ""
        more = f"{needs[rank] - limits[rank]:,.6g}{unit} more than its limit of {limits[rank]:,.6g}{unit}"
        what = f"rank {rank} needs {needs[rank]:,.6g}{unit} for one microbatch, {more}"
        raise ScheduleError(f"placement {problem.placement}: {what}")


def limits_of(limit: float | Sequence[float] | None, ranks: int) -> tuple[float, ...] | None:
    """Returns one limit per rank."""
    if limit is None:
        return None
    several = isinstance(limit, Iterable) and not isinstance(limit, str)
    limits: tuple[Any, ...] = tuple(limit) if several else (limit,) * ranks  # type: ignore[arg-type]
    for each in limits:
        require_limit(each)
    if len(limits) != ranks:
        raise ScheduleError(f"memory_limit has {len(limits)} entries for {ranks} ranks; give one number or one a rank")
    return limits
