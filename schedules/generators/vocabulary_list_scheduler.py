"""A clock for placing S and T: ranks choose when they are free, and see what is ready and since when.

Beside the passes of `zbcompile.schedules.generators.list_scheduler` it knows the barriers: S of every shard begins
after the forward of the last stage, T after S of every shard, the backward of the last stage after S (one barrier) or T
(two) of every shard.
"""

import math
from collections.abc import Iterator

from zbcompile.schedules.ir.actions import BW, Action, B, F, Pair, S, Step, T, W, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.dependencies import users
from zbcompile.schedules.ir.placement import Placement


class VocabularyClock:
    """The state of an unfinished step: time, ready actions, memory in use, S without its T (`states`), by rank."""

    def __init__(self, placement: Placement, microbatches: int, costs: Costs, barriers: int) -> None:
        self.placement, self.microbatches, self.costs, self.barriers = placement, microbatches, costs, barriers
        self.last = placement.stages - 1
        self.shard_of = [placement.stages_of(rank)[0] for rank in range(placement.ranks)]
        self.now: float = 0
        self.ready_at: dict[Action, float] = {Action(F, 0, m): 0 for m in range(microbatches)}
        self.started = {(op, stage): 0 for op in (F, B, W, S, T) for stage in range(placement.stages)}
        self.memory: list[float] = [0] * placement.ranks
        self.states = [0] * placement.ranks
        self._memory = {op: costs.added(op) for op in (F, B, W, BW)}
        self._users = {(op, s): [*users(op, s, placement.stages)] for op in (F, B) for s in range(placement.stages)}
        self._users |= {(BW, s): [u for u in self._users[B, s] if u.op == B] for s in range(placement.stages)}
        del self._users[F, self.last]
        self._missing = {(op, m): placement.ranks for op in (S, T) for m in range(microbatches)}
        self._latest = {(op, m): 0.0 for op in (S, T) for m in range(microbatches)}

    def next(self, op: str, stage: int) -> Action:
        """The action of `op` on `stage` that comes next (B stands for BW too)."""
        return Action(op, stage, self.started[op, stage])

    def is_ready(self, action: Action) -> bool:
        """Whether it could begin now."""
        return self.ready_at.get(_half(action), math.inf) <= self.now

    def start(self, rank: int, step: Step) -> tuple[float, list[tuple[float, int]]]:
        """Run `step` now; return its end, and the times at which it makes something ready on which ranks."""
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
        if action.op in self._memory:
            self.memory[rank] += self._memory[action.op][action.stage]
        self.states[rank] += (action.op == S) - (action.op == T)

    def _finish(self, rank: int, action: Action, end: float) -> Iterator[tuple[float, int]]:
        op, stage, microbatch = action
        if op in (S, T):
            yield from self._shard_done(op, microbatch, end)
        elif op == F and stage == self.last:  # its backward waits for the shards
            yield from self._shards(S, microbatch, end + self.costs.delay(F))
        for other, at in self._users.get((op, stage), ()):
            yield self._hop(Action(other, at, microbatch), min(stage, at), rank, end)

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
        time = self._latest[key] + self.costs.delay(op)
        if op == S:
            yield from self._shards(T, microbatch, time)
        if op == (S, T)[self.barriers - 1]:
            self.ready_at[Action(B, self.last, microbatch)] = time
            yield time, self.placement.rank(self.last)


def _half(action: Action) -> Action:
    """BW makes and needs what B does."""
    return action._replace(op=B) if action.op == BW else action
