"""The problem of a search: the passes of a step as numbers, their inputs, and the memory of the
ranks.

It is a view of the order graph of the sequential order, in which every microbatch runs alone.
Passes of one operation and stage run in order of their microbatches: where stages are equal for all
microbatches, as the costs say, no other order is shorter, and weight gradients must accumulate in
this one.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
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

    `barrier`: the objective is the makespan, else the longest span of a rank. By pass: its action,
    rank and time, what it adds to the memory of its rank, and in `inputs` what it needs and how
    long that is sent; the numbers behind those of the passes stand for "every shard has run it".
    `offset` is, by rank, what is added to the end of its last pass; the largest of these sums is
    the objective.
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
        self.sharded, self.microbatches = any((*costs.vocab_s, *costs.vocab_t)), microbatches
        self.sequential = sequential_order(placement, microbatches, barriers if self.sharded else 0)
        graph, ranks = OrderGraph(self.sequential), range(placement.ranks)
        self.actions = flatten(graph.steps[: graph.first[-1]])
        self.number = {action: n for n, action in enumerate(self.actions)}
        self.rank = [rank for rank in ranks for _ in graph.nodes(rank)]
        self.time = graph.times(costs)
        added = {op: costs.added(op) for op in (F, B, W, S, T)}
        self.added = [added[op][stage] for op, stage, _ in self.actions]
        self.inputs, self.users = graph.inputs_and_users(costs)
        producers = {n: [producer for producer, _ in links] for n, links in enumerate(self.inputs)}
        self._topological = [*TopologicalSorter(producers).static_order()]
        # the earliest start of every pass if ranks could run any number of passes in parallel
        self.heads: list[float] = [0] * len(self.inputs)
        for n in self._topological:
            arrivals = (self.heads[p] + self.time[p] + delay for p, delay in self.inputs[n])
            self.heads[n] = max(arrivals, default=0)
        optimizer = [
            sum(costs.optimizer[stage] for stage in placement.stages_of(rank)) for rank in ranks
        ]
        self.offset = [max(optimizer)] * len(optimizer)
        if not barrier:
            starts = (
                min(h for h, r in zip(self.heads, self.rank, strict=False) if r == rank)
                for rank in ranks
            )
            self.offset = [time - start for time, start in zip(optimizer, starts, strict=True)]

    def order_of(self, schedule: Schedule) -> Order | None:
        """Returns the order of a schedule with pairs and BW opened; None if the memory does not
        hold it."""
        order: Order = []
        for rank, steps in enumerate(schedule.orders):
            counts: dict[tuple[str, int], int] = {}
            numbers: list[int] = []
            for fused, stage, _ in flatten(steps):
                is_second_copy = self.placement.rank(stage) != rank
                for op in (B, W) if fused == BW else (fused,):
                    m = counts.get((op, stage), self.microbatches // 2 if is_second_copy else 0)
                    counts[op, stage] = m + 1
                    numbers.append(self.number[Action(op, stage, m)])
            order.append(numbers)
        return order if self.fits(order) else None

    def fits(self, order: Order) -> bool:
        """Returns whether no rank exceeds its limit."""
        return self.limits is None or all(
            max(accumulate(self.added[n] for n in passes), default=0) <= limit * ROUNDING
            for passes, limit in zip(order, self.limits, strict=True)
        )

    def schedule(self, order: Order) -> Schedule:
        """Returns the schedule, called "auto", that runs an order."""
        return replace(
            self.sequential,
            orders=tuple(tuple(self.actions[n] for n in passes) for passes in order),
        )

    def ends(self, order: Order) -> list[float]:
        """Returns the end of every pass of an order."""
        _, run = run_to_end(self.schedule(order), self.costs)
        ends = dict(zip((n for passes in order for n in passes), run.end, strict=False))
        return [ends[n] for n in range(len(self.actions))]

    def lower_bound(self) -> float:
        """Returns the textbook bound: what precedes a rank's first pass, its work, and what follows
        its last pass.

        Within limits also: the memory that microbatches hold, times the time that they hold it,
        divided by the limit.
        """
        # the least that follows the end of every pass
        tails: list[float] = [self.offset[rank] for rank in self.rank]
        tails += [-math.inf] * (len(self.inputs) - len(tails))
        for n in reversed(self._topological):
            tails[n] = max(
                [
                    tails[n],
                    *(tails[user] + self.time[user] + delay for user, delay in self.users[n]),
                ]
            )
        bounds: list[float] = []
        for rank in range(self.placement.ranks):
            passes = [n for n, r in enumerate(self.rank) if r == rank]
            around = min(self.heads[n] for n in passes) + min(tails[n] for n in passes)
            bounds.append(around + sum(self.time[n] for n in passes))
            limit = self.limits[rank] if self.limits else 0
            if limit:
                area = sum(map(self._memory_time, passes))
                bounds.append(around + area / (limit * ROUNDING))
        return max(bounds)

    def _memory_time(self, n: int) -> float:
        """Returns the memory of a forward times the least time until its backward ends; for a W,
        its residue's."""
        op, stage, m = self.actions[n]
        if op == F:
            backward = self.number[Action(B, stage, m)]
            return self.costs.activation[stage] * (
                self.heads[backward] + self.time[backward] - self.heads[n]
            )
        return self.costs.residue[stage] * self.time[n] if op == W else 0

    def missing_memory(self) -> str:
        """Returns the rank on which not even one microbatch at a time fits, and what is missing; ""
        if all fit."""
        unit = f" {self.costs.memory_unit}" if self.costs.memory_unit else ""
        for rank, peak in enumerate(peak_memory(self.sequential, self.costs)):
            limit = float(self.limits[rank] if self.limits else peak)
            if peak > limit * ROUNDING:
                needs = f"rank {rank} needs {float(peak):,.6g}{unit} for one microbatch"
                more = f"{peak - limit:,.6g}{unit} more than its limit of {limit:,.6g}{unit}"
                return f"placement {self.placement}: {needs}, {more}"
        return ""


def limits_of(limit: float | Sequence[float] | None, ranks: int) -> tuple[float, ...] | None:
    """Returns one limit per rank."""
    if limit is None:
        return None
    several = isinstance(limit, Sequence) and not isinstance(limit, str)
    limits: tuple[Any, ...] = tuple(limit) if several else (limit,) * ranks  # type: ignore[arg-type]
    for value in limits:
        require_limit(value)
    if len(limits) != ranks:
        raise ScheduleError(
            f"memory_limit has {len(limits)} entries for {ranks} ranks; give one number or one a"
            " rank"
        )
    return limits
