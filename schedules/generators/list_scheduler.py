"""Event-driven dispatching: ranks that choose their next action when they are free, instead of
following an order.

The generators that have no closed rule for a part of their order (ZB-V with few microbatches,
warm-up and cool-down of V-Half and V-Min, vocabulary passes) state what a rank prefers and read the
order off the clock.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heappop, heappush

from zbcompile.schedules.execution.deadlock import run_to_end
from zbcompile.schedules.execution.order_graph import OrderGraph
from zbcompile.schedules.generators.task import Orders, Task
from zbcompile.schedules.ir.actions import BW, Action, B, F, Pair, S, Step, T, W, flatten
from zbcompile.schedules.ir.kinds import result_of
from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.schedules.simulation.timeline import simulate


def sequential_order(placement: Placement, microbatches: int, barriers: int = 0) -> Schedule:
    """Returns the order that holds least: every microbatch runs alone, with its backward split.

    `barriers` is that of `with_vocabulary`; 0: without vocabulary passes.
    """
    stages, orders = range(placement.stages), [list[Action]() for _ in range(placement.ranks)]
    schedule = Schedule("auto", placement, microbatches, (), barriers or 1)
    shards = [placement.stages_of(rank)[0] for rank in range(placement.ranks)] if barriers else []
    for m in range(microbatches):
        passes = [(F, stage) for stage in stages]
        passes += [(op, shard) for op in (S, T) for shard in shards]
        passes += [(op, stage) for stage in reversed(stages) for op in (B, W)]
        for op, stage in passes:
            orders[schedule.rank_of(stage, m)].append(Action(op, stage, m))
    return replace(schedule, orders=tuple(map(tuple, orders)))


class DispatchState:
    """The clock, the actions that are ready and since when, how many have started, and the memory
    in use.

    The passes of one operation and stage run in order of their microbatches; BW counts as B.
    Vocabulary passes take no memory.
    """

    def __init__(self, task: Task, barriers: int = 0) -> None:
        self.placement, self.costs, self.barriers = task.placement, task.costs_or_equal, barriers
        self.now: float = 0
        self.memory: list[float] = [0] * task.ranks
        self.started = {
            (op, stage): 0 for op in (F, B, W, S, T) for stage in range(task.placement.stages)
        }
        self.ready_at: dict[tuple[str, int, int], float] = {
            (F, 0, m): 0 for m in range(task.microbatches)
        }
        self._passes = [
            [(op, s) for s in task.placement.stages_of(r) for op in (F, B, W)]
            for r in range(task.ranks)
        ]
        self._times = {op: self.costs.times(op) for op in (F, B, W, BW, S, T)}
        self._added = {op: self.costs.added(op) for op in (F, B, W, BW)}
        self._graph = graph = OrderGraph(
            sequential_order(task.placement, task.microbatches, barriers)
        )
        self._rank = [rank for rank in range(task.ranks) for _ in graph.nodes(rank)]
        inputs, self._users = graph.inputs_and_users(self.costs)
        self._missing = [*map(len, inputs)]
        self._arrival: list[float] = [0] * len(inputs)

    def is_ready(self, action: Action) -> bool:
        """Returns whether `action` could begin now."""
        return self.ready_at.get((result_of(action.op), *action[1:]), math.inf) <= self.now

    def next_ready(self, op: str, stage: int) -> Action | None:
        """Returns the next action of `op` on `stage` if it could begin now."""
        head = (op, stage, self.started[op, stage])
        return Action(*head) if self.ready_at.get(head, math.inf) <= self.now else None

    def ready(self, rank: int) -> list[Action]:
        """Returns the F, B and W of `rank` that could begin now, at most one of each operation on
        each stage."""
        now, started, ready_at = self.now, self.started, self.ready_at
        heads = [(op, stage, started[op, stage]) for op, stage in self._passes[rank]]
        return [Action(*head) for head in heads if ready_at.get(head, math.inf) <= now]

    def time(self, step: Step) -> float:
        if isinstance(step, Pair):
            return self.costs.pair_time(*step.first[:2], *step.second[:2])
        return self._times[step.op][step.stage]

    def added(self, action: Action) -> float:
        """Returns what `action` adds to the memory of its rank (below 0: frees)."""
        return self._added[action.op][action.stage] if action.op in self._added else 0

    def fits_forward(self, rank: int, forward: Action, limit: float) -> bool:
        """Returns whether `forward` leaves room for the oldest microbatch to finish its forwards on
        its rank.

        So the oldest microbatch can always proceed, and no limit ends in a deadlock (banker's
        algorithm).
        """
        stages = self.placement.stages_of(rank)
        oldest = min(self.started[B, stage] for stage in stages)
        owed = [Action(F, stage, oldest) for stage in stages if self.started[F, stage] <= oldest]
        needed = sum(map(self.added, (forward, *(action for action in owed if action != forward))))
        # sums of sizes count as equal up to rounding
        return self.memory[rank] + needed <= limit * (1 + 1e-9)

    def start(self, rank: int, step: Step) -> list[tuple[float, int]]:
        """Runs `step` now; returns when which ranks choose again: first its own, then those of what
        gets ready."""
        end, arrivals, missing, ranks = (
            self.now + self.time(step),
            self._arrival,
            self._missing,
            self._rank,
        )
        wakes = [(end, rank)]
        for action in step if isinstance(step, Pair) else (step,):
            op, stage, microbatch = action
            result = result_of(op)
            self.started[result, stage] += 1
            self.memory[rank] += self.added(action)
            done = [(self._graph.node(result, stage, microbatch), end)]
            for node, time in done:
                for user, delay in self._users[node]:
                    if time + delay > arrivals[user]:
                        arrivals[user] = time + delay
                    missing[user] -= 1
                    if not missing[user] and user >= len(ranks):  # a barrier
                        done.append((user, arrivals[user]))
                    elif not missing[user]:
                        arrival = self.ready_at[self._graph.steps[user]] = arrivals[user]  # type: ignore[index]
                        if arrival > end or ranks[user] != rank:
                            wakes.append((arrival, ranks[user]))
        return wakes


def oldest(actions: Iterable[Action]) -> Action | None:
    """Returns the action of the earliest microbatch, and of the latest stage among several; None
    without any."""
    return min(actions, key=lambda action: (action.microbatch, -action.stage), default=None)


def dispatch(state: DispatchState, choose: Callable[[DispatchState, int], Step | None]) -> Orders:
    """Lets every free rank start what `choose(state, rank)` returns; None waits until something
    else gets ready."""
    orders: list[list[Step]] = [[] for _ in range(state.placement.ranks)]
    free_at: list[float] = [0] * len(orders)
    wakes = [(0.0, rank) for rank in range(len(orders))]
    while wakes:
        state.now, rank = heappop(wakes)
        step = choose(state, rank) if free_at[rank] <= state.now else None
        if step is not None:
            orders[rank].append(step)
            step_wakes = state.start(rank, step)
            free_at[rank], _ = step_wakes[0]
            for time, woken in step_wakes:
                if time >= free_at[woken]:  # otherwise it chooses again anyway once it is free
                    heappush(wakes, (time, woken))
    return tuple(map(tuple, orders))


def starts(task: Task, orders: Orders) -> dict[Action, float]:
    """Returns the start of every action of `orders` (which have no pairs), if each starts as early
    as it can."""
    graph, run = run_to_end(task.schedule(orders), task.costs_or_equal)
    return dict(zip(flatten(graph.steps), run.start, strict=True))


def spans(task: Task, orders: Orders) -> tuple[float, float]:
    """Returns cost (longest span of a rank) and makespan of `orders`, without optimizers."""
    step = simulate(task.schedule(orders), replace(task.costs_or_equal, optimizer=()))
    return step.cost, step.makespan
