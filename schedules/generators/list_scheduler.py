"""Event-driven dispatching: ranks that choose their next action when they are free, instead of following an order.

The generators that have no closed rule for a part of their order (ZB-V with few microbatches, warm-up and cool-down of
V-Half and V-Min) state what a rank prefers and read the order off the clock.
"""

import heapq
import math
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from zbcompile.schedules.execution.event_loop import run
from zbcompile.schedules.generators.task import Orders, Task
from zbcompile.schedules.ir.actions import Action, B, F, W, flatten


class Link(NamedTuple):
    """An operation that waits for another one, and how long the message to its rank takes."""

    op: str
    stage: int
    rank: int
    delay: float


class Floor:
    """What the ranks see: the clock, which actions are ready since when, what has been started, memory in use."""

    def __init__(self, task: Task) -> None:
        self.placement = placement = task.placement
        self.costs = costs = task.costs_or_equal
        self.now: float = 0
        self.ready_at: dict[Action, float] = {Action(F, 0, microbatch): 0 for microbatch in range(task.microbatches)}
        self.started = {(op, stage): 0 for op in (F, B, W) for stage in range(placement.stages)}
        self.memory: list[float] = [0] * placement.ranks
        self._times = {op: costs.times(op) for op in (F, B, W)}
        freed = [left - whole for left, whole in zip(costs.residue, costs.activation, strict=True)]
        self._memory = {F: costs.activation, B: tuple(freed), W: tuple(-left for left in costs.residue)}
        self._links = {(op, stage): self._links_from(op, stage) for op, stage in self.started}

    def is_ready(self, action: Action) -> bool:
        """Whether `action` could begin now."""
        return self.ready_at.get(action, math.inf) <= self.now

    def ready(self, rank: int) -> list[Action]:
        """Per operation and stage of `rank` the next action, if it could begin now."""
        heads = (Action(op, stage, self.started[op, stage]) for stage in self.placement.stages_of(rank) for op in "FBW")
        return list(filter(self.is_ready, heads))

    def time(self, action: Action) -> float:
        return self._times[action.op][action.stage]

    def added(self, action: Action) -> float:
        """What `action` adds to the memory of its rank (below 0: frees)."""
        return self._memory[action.op][action.stage]

    def start(self, rank: int, action: Action) -> tuple[float, list[tuple[float, int]]]:
        """Run `action` now; return its end, and when it makes something ready on which other rank."""
        op, stage, microbatch = action
        end = self.now + self._times[op][stage]
        self.started[op, stage] += 1
        self.memory[rank] += self._memory[op][stage]
        arrivals = []
        for link in self._links[op, stage]:
            ready_at = end + link.delay
            self.ready_at[Action(link.op, link.stage, microbatch)] = ready_at
            if link.rank != rank:
                arrivals.append((ready_at, link.rank))
        return end, arrivals

    def _links_from(self, op: str, stage: int) -> list[Link]:
        """What waits for `op` on `stage`."""
        here = self.placement.rank(stage)
        if op == F and stage + 1 < self.placement.stages:
            there = self.placement.rank(stage + 1)
            return [Link(F, stage + 1, there, self.costs.hop(stage, here, there))]
        if op == F:
            return [Link(B, stage, here, 0)]
        links = [Link(W, stage, here, 0)] if op == B else []
        if op == B and stage > 0:
            there = self.placement.rank(stage - 1)
            links.append(Link(B, stage - 1, there, self.costs.hop(stage - 1, here, there)))
        return links


Choice = Callable[[Floor, int], Action | None]


def dispatch(floor: Floor, choose: Choice) -> Orders:
    """Let every free rank start what `choose(floor, rank)` returns; None waits until something else becomes ready."""
    orders: list[list[Action]] = [[] for _ in range(floor.placement.ranks)]
    free_at: list[float] = [0] * len(orders)
    wakes = [(0.0, rank) for rank in range(len(orders))]
    while wakes:
        floor.now, rank = heapq.heappop(wakes)
        action = choose(floor, rank) if free_at[rank] <= floor.now else None
        if action is None:
            continue
        orders[rank].append(action)
        free_at[rank], arrivals = floor.start(rank, action)
        heapq.heappush(wakes, (free_at[rank], rank))
        for time, there in arrivals:
            if time >= free_at[there]:  # else it chooses again anyway when it is free
                heapq.heappush(wakes, (time, there))
    return tuple(map(tuple, orders))


def begins(task: Task, orders: Orders) -> dict[Action, float]:
    """When every action of `orders` (no pairs) begins, each as early as it can."""
    times = run(task.schedule(orders), task.costs_or_equal).begin
    actions = (action for order in orders for action in flatten(order))
    return dict(zip(actions, chain.from_iterable(times), strict=True))


def spans(task: Task, orders: Orders) -> tuple[float, float]:
    """Cost (longest own span of a rank) and makespan of `orders`."""
    outcome = run(task.schedule(orders), task.costs_or_equal)
    ends = [end[-1] for end in outcome.end]
    return max(end - begin[0] for end, begin in zip(ends, outcome.begin, strict=True)), max(ends)
