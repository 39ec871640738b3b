"""Event-driven dispatching: ranks that choose their next action when they are free, instead of following an order.

The generators that have no closed rule for a part of their order (ZB-V with few microbatches, warm-up and cool-down of
V-Half and V-Min) state what a rank prefers and read the order off the clock.
"""

import heapq
from collections.abc import Callable
from operator import itemgetter

from zbcompile.schedules.actions import Action, B, F, W
from zbcompile.schedules.costs import Costs
from zbcompile.schedules.engine import run
from zbcompile.schedules.placement import Placement
from zbcompile.schedules.schedule import Schedule
from zbcompile.schedules.task import Orders


class Floor:
    """What the ranks see: the clock, which actions are ready since when, what has been started, memory in use."""

    def __init__(self, placement: Placement, microbatches: int, costs: Costs) -> None:
        self.placement = placement
        self.microbatches = microbatches
        self.costs = costs
        self.now: float = 0
        self.ready_at: dict[Action, float] = {Action(F, 0, microbatch): 0 for microbatch in range(microbatches)}
        self.started = {(op, stage): 0 for op in (F, B, W) for stage in range(placement.stages)}
        self.memory: list[float] = [0] * placement.ranks
        self._times = {op: costs.times(op) for op in (F, B, W)}
        freed = [left - whole for left, whole in zip(costs.residue, costs.activation, strict=True)]
        self._memory = {F: costs.activation, B: tuple(freed), W: tuple(-left for left in costs.residue)}

    def ready(self, rank: int) -> list[Action]:
        """Per operation and stage of `rank` the next action, if it could begin now."""
        heads = (Action(op, stage, self.started[op, stage]) for stage in self.placement.stages_of(rank) for op in "FBW")
        return [head for head in heads if self.ready_at.get(head, self.now + 1) <= self.now]

    def time(self, action: Action) -> float:
        return self._times[action.op][action.stage]

    def added(self, action: Action) -> float:
        """What `action` adds to the memory of its rank (below 0: frees)."""
        return self._memory[action.op][action.stage]

    def start(self, rank: int, action: Action) -> tuple[float, list[tuple[float, int]]]:
        """Run `action` now; return its end and the (time, rank) at which something becomes ready because of it."""
        end = self.now + self.time(action)
        self.started[action.op, action.stage] += 1
        self.memory[rank] += self.added(action)
        wakes = []
        for follower, stage in self._followers(action):
            there = self.placement.rank(follower.stage)
            self.ready_at[follower] = end + self.costs.hop(stage, rank, there)
            wakes.append((self.ready_at[follower], there))
        return end, wakes

    def _followers(self, action: Action) -> list[tuple[Action, int]]:
        """What waits for `action`, with the stage whose output has to travel."""
        op, stage, microbatch = action
        if op == F and stage + 1 < self.placement.stages:
            return [(Action(F, stage + 1, microbatch), stage)]
        if op == F:
            return [(Action(B, stage, microbatch), stage)]
        if op == B and stage > 0:
            return [(Action(W, stage, microbatch), stage), (Action(B, stage - 1, microbatch), stage - 1)]
        return [(Action(W, stage, microbatch), stage)] if op == B else []


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
        free_at[rank], woken = floor.start(rank, action)
        for wake in (*woken, (free_at[rank], rank)):
            heapq.heappush(wakes, (max(wake[0], free_at[wake[1]]), wake[1]))
    return tuple(map(tuple, orders))


def begins(placement: Placement, microbatches: int, orders: Orders, costs: Costs) -> dict[Action, float]:
    """When every action of unpaired `orders` begins, each as early as it can."""
    times = run(Schedule("", placement, microbatches, orders), costs).begin
    return {action: time for rank, order in enumerate(orders) for action, time in zip(order, times[rank], strict=True)}  # type: ignore[misc]


def spans(placement: Placement, microbatches: int, orders: Orders, costs: Costs) -> tuple[float, float]:
    """Cost (longest own span of a rank) and makespan of `orders`."""
    result = run(Schedule("", placement, microbatches, orders), costs)
    pairs = [(begin[0], end[-1]) for begin, end in zip(result.begin, result.end, strict=True)]
    return max(end - begin for begin, end in pairs), max(map(itemgetter(1), pairs))
