"""A clock for placing S and T: ranks choose when they are free, and see what is ready since when.

Beside the passes of `zbcompile.schedules.generators.list_scheduler` it knows the barriers: S of every shard begins
after the forward of the last stage, T after S of every shard, the backward of the last stage after S (one barrier) or T
(two) of every shard.
"""

import heapq
import math
from collections.abc import Callable, Iterator

from zbcompile.schedules.generators.task import Orders
from zbcompile.schedules.ir.actions import BW, Action, B, F, Pair, S, Step, T, W, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.placement import Placement


class VocabularyClock:
    """The state of a step in the making: time, what is ready, memory in use, S without its T (`states`), by rank."""

    def __init__(self, placement: Placement, microbatches: int, costs: Costs, barriers: int) -> None:
        self.placement, self.microbatches, self.costs, self.barriers = placement, microbatches, costs, barriers
        self.last = placement.stages - 1
        self.shard_of = [placement.stages_of(rank)[0] for rank in range(placement.ranks)]
        self.now: float = 0
        self.ready_at: dict[Action, float] = {Action(F, 0, m): 0 for m in range(microbatches)}
        self.started = {(op, stage): 0 for op in (F, B, W, S, T) for stage in range(placement.stages)}
        self.memory: list[float] = [0] * placement.ranks
        self.states = [0] * placement.ranks
        self._missing = {(op, m): placement.ranks for op in (S, T) for m in range(microbatches)}
        self._latest = {(op, m): 0.0 for op in (S, T) for m in range(microbatches)}

    def next(self, op: str, stage: int) -> Action:
        """The action of `op` on `stage` that comes next (B stands for BW too)."""
        return Action(op, stage, self.started[op, stage])

    def is_ready(self, action: Action) -> bool:
        """Whether it could begin now."""
        return self.ready_at.get(_half(action), math.inf) <= self.now

    def start(self, rank: int, step: Step) -> tuple[float, list[tuple[float, int]]]:
        """Run `step` now; return its end, and when it makes something ready on which rank."""
        actions = flatten((step,))
        end = self.now + self._time(step)
        for action in actions:
            self.started[_half(action).op, action.stage] += 1
            self._hold(rank, action)
        return end, [wake for action in actions for wake in self._finish(rank, action, end)]

    def _time(self, step: Step) -> float:
        if isinstance(step, Pair):
            return self.costs.pair_time(step.forward.stage, step.backward.stage, step.backward.op)
        return self.costs.time(step.op, step.stage)

    def _hold(self, rank: int, action: Action) -> None:
        activation, residue = self.costs.activation[action.stage], self.costs.residue[action.stage]
        self.memory[rank] += {F: activation, B: residue - activation, W: -residue, BW: -activation}.get(action.op, 0)
        self.states[rank] += {S: 1, T: -1}.get(action.op, 0)

    def _finish(self, rank: int, action: Action, end: float) -> Iterator[tuple[float, int]]:
        op, stage, microbatch = action
        if op == F and stage == self.last:
            yield from self._shards(S, microbatch, end + self.costs.cast_time)
        elif op == F:
            yield self._hop(Action(F, stage + 1, microbatch), stage, rank, end)
        elif op in (S, T):
            yield from self._shard_done(op, microbatch, end)
        elif op in (B, BW):
            if op == B:
                self.ready_at[Action(W, stage, microbatch)] = end
            if stage:
                yield self._hop(Action(B, stage - 1, microbatch), stage - 1, rank, end)

    def _hop(self, action: Action, stage: int, rank: int, end: float) -> tuple[float, int]:
        there = self.placement.rank(action.stage)
        self.ready_at[action] = end + self.costs.hop(stage, rank, there)
        return self.ready_at[action], there

    def _shards(self, op: str, microbatch: int, time: float) -> Iterator[tuple[float, int]]:
        for rank, shard in enumerate(self.shard_of):
            self.ready_at[Action(op, shard, microbatch)] = time
            yield time, rank

    def _shard_done(self, op: str, microbatch: int, end: float) -> Iterator[tuple[float, int]]:
        key = (op, microbatch)
        self._missing[key] -= 1
        self._latest[key] = max(self._latest[key], end)
        if self._missing[key]:
            return
        time = self._latest[key] + self.costs.stats_time
        if op == S:
            yield from self._shards(T, microbatch, time)
        if op == (S, T)[self.barriers - 1]:
            self.ready_at[Action(B, self.last, microbatch)] = time
            yield time, self.placement.rank(self.last)


Choice = Callable[[VocabularyClock, int], Step | None]


def dispatch_with_vocabulary(clock: VocabularyClock, choose: Choice) -> Orders:
    """Let every free rank start what `choose(clock, rank)` returns; None waits until something becomes ready."""
    orders: list[list[Step]] = [[] for _ in clock.shard_of]
    free_at: list[float] = [0] * len(orders)
    wakes: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(orders))]
    while wakes:
        clock.now, rank = heapq.heappop(wakes)
        step = choose(clock, rank) if free_at[rank] <= clock.now else None
        if step is None:
            continue
        orders[rank].append(step)
        free_at[rank], ready = clock.start(rank, step)
        heapq.heappush(wakes, (free_at[rank], rank))
        for time, there in ready:
            if time >= free_at[there]:  # else it chooses again anyway when it is free
                heapq.heappush(wakes, (time, there))
    return tuple(map(tuple, orders))


def _half(action: Action) -> Action:
    """BW makes and needs what B does."""
    return action._replace(op=B) if action.op == BW else action
