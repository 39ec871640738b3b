"""Event-driven dispatching: ranks that choose their next action when they are free, instead of following an order.

The generators that have no closed rule for a part of their order (ZB-V with few microbatches, warm-up and cool-down of
V-Half and V-Min) state what a rank prefers and read the order off the clock.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from zbcompile.schedules.execution.deadlock import run_to_end
from zbcompile.schedules.generators.task import Orders, Task
from zbcompile.schedules.ir.actions import Action, B, F, Step, W, flatten
from zbcompile.schedules.ir.dependencies import users

Dependent = tuple[str, int, int, float]  # what waits for an operation, its stage and rank, and how long the way takes


class Floor:
    """What the ranks see: the clock, which actions are ready and since when, which have started, the memory in use."""

    def __init__(self, task: Task) -> None:
        self.placement = placement = task.placement
        self.costs = costs = task.costs_or_equal
        self.now: float = 0
        self.ready_at: dict[tuple[str, int, int], float] = {(F, 0, m): 0 for m in range(task.microbatches)}
        self._passes = [[(op, s) for s in placement.stages_of(rank) for op in "FBW"] for rank in range(task.ranks)]
        self.started = {(op, stage): 0 for op in (F, B, W) for stage in range(placement.stages)}
        self.memory: list[float] = [0] * placement.ranks
        self._times = {op: costs.times(op) for op in (F, B, W)}
        self._memory = {op: costs.added(op) for op in (F, B, W)}
        self._dependents = {(op, stage): self._dependents_of(op, stage) for op, stage in self.started}

    def next(self, op: str, stage: int) -> Action:
        """The action of `op` on `stage` that comes next."""
        return Action(op, stage, self.started[op, stage])

    def is_ready(self, action: Action) -> bool:
        """Whether `action` could begin now."""
        return self.ready_at.get(action, math.inf) <= self.now

    def ready(self, rank: int) -> list[Action]:
        """The actions of `rank` that could begin now, at most one of each operation on each stage."""
        now, started, ready_at = self.now, self.started, self.ready_at
        heads = [(op, stage, started[op, stage]) for op, stage in self._passes[rank]]
        return [Action(*head) for head in heads if ready_at.get(head, math.inf) <= now]

    def time(self, action: Action) -> float:
        return self._times[action.op][action.stage]

    def added(self, action: Action) -> float:
        """What `action` adds to the memory of its rank (below 0: frees)."""
        return self._memory[action.op][action.stage]

    def has_room(self, rank: int, forward: Action, limit: float) -> bool:
        """Whether `forward` fits into the limit of its rank and leaves room for the oldest microbatch to finish its
        forwards there. So the oldest microbatch can always go on, and no limit ends in a deadlock (banker's
        algorithm)."""
        stages = self.placement.stages_of(rank)
        oldest = min(self.started[B, stage] for stage in stages)
        owed = [Action(F, stage, oldest) for stage in stages if self.started[F, stage] <= oldest]
        needed = sum(map(self.added, (forward, *(action for action in owed if action != forward))))
        return self.memory[rank] + needed <= limit * (1 + 1e-9)  # sums of sizes count as equal up to rounding

    def start(self, rank: int, step: Any) -> tuple[float, list[tuple[float, int]]]:
        """Run `step` now; return its end, and the times at which it makes something ready on which ranks."""
        op, stage, _ = step
        end = self.now + self._times[op][stage]
        self.started[op, stage] += 1
        self.memory[rank] += self._memory[op][stage]
        return end, self._delivered(rank, step, end)

    def _delivered(self, rank: int, action: Action, end: float) -> list[tuple[float, int]]:
        """Make ready what waits for `action`, which ends at `end`; return when that arrives on other ranks."""
        op, stage, microbatch = action
        arrivals = []
        for other, there, its_rank, delay in self._dependents[op, stage]:
            self.ready_at[other, there, microbatch] = ready_at = end + delay
            if its_rank != rank:
                arrivals.append((ready_at, its_rank))
        return arrivals

    def _dependents_of(self, op: str, stage: int) -> list[Dependent]:
        """What waits for `op` on `stage`."""
        here = self.placement.rank(stage)
        waiting = ((other, at, self.placement.rank(at)) for other, at in users(op, stage, self.placement.stages))
        return [(other, at, rank, self.costs.hop(min(stage, at), here, rank)) for other, at, rank in waiting]


def oldest(actions: Iterable[Action]) -> Action | None:
    """The action of the earliest microbatch; if it has several, that of the latest stage. None if there are none."""
    return min(actions, key=lambda action: (action.microbatch, -action.stage), default=None)


AnyFloor = TypeVar("AnyFloor", bound=Floor)


def dispatch(floor: AnyFloor, choose: Callable[[AnyFloor, int], Step | None]) -> Orders:
    """Let every free rank start what `choose(floor, rank)` returns; None waits until something else becomes ready."""
    orders: list[list[Step]] = [[] for _ in range(floor.placement.ranks)]
    free_at: list[float] = [0] * len(orders)
    wakes = [(0.0, rank) for rank in range(len(orders))]
    while wakes:
        floor.now, rank = heapq.heappop(wakes)
        step = choose(floor, rank) if free_at[rank] <= floor.now else None
        if step is None:
            continue
        orders[rank].append(step)
        free_at[rank], ready = floor.start(rank, step)
        heapq.heappush(wakes, (free_at[rank], rank))
        for time, there in ready:
            if time >= free_at[there]:  # otherwise it chooses again anyway once it is free
                heapq.heappush(wakes, (time, there))
    return tuple(map(tuple, orders))


def begins(task: Task, orders: Orders) -> dict[Action, float]:
    """Returns the begin of every action of `orders` (which have no pairs), if each begins as early as it can."""
    graph, run = run_to_end(task.schedule(orders), task.costs_or_equal)
    return dict(zip(flatten(graph.steps), run.start, strict=True))


def spans(task: Task, orders: Orders) -> tuple[float, float]:
    """Returns cost (longest own span of a rank) and makespan of `orders`."""
    graph, run = run_to_end(task.schedule(orders), task.costs_or_equal)
    ranks = [nodes for nodes in map(graph.nodes, range(task.ranks)) if nodes]
    return max(run.end[nodes[-1]] - run.start[nodes[0]] for nodes in ranks), max(run.end)
