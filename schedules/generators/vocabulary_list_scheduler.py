"""The clock of `zbcompile.schedules.generators.list_scheduler` with fused backwards, pairs, and the passes S and T.

It knows the barriers: S of every shard begins after the forward of the last stage, T after S of every shard, the
backward of the last stage after S (one barrier) or T (two) of every shard.
"""

from collections.abc import Iterator

from zbcompile.schedules.generators.list_scheduler import Floor
from zbcompile.schedules.generators.task import Task
from zbcompile.schedules.ir.actions import BW, Action, B, F, Pair, S, Step, T, flatten


class VocabularyClock(Floor):
    """Beside what `Floor` shows: S without its T (`states`), by rank. B stands for BW in what is next or ready."""

    def __init__(self, task: Task, barriers: int) -> None:
        super().__init__(task)
        stages, ranks, microbatches = range(task.placement.stages), range(task.ranks), range(task.microbatches)
        self.barriers, self.last = barriers, stages[-1]
        self.shard_of = [task.placement.stages_of(rank)[0] for rank in ranks]
        self.states = [0 for _ in ranks]
        self.started |= {(op, stage): 0 for op in (S, T) for stage in stages}
        self._times |= {op: self.costs.times(op) for op in (BW, S, T)}
        self._memory[BW] = self.costs.added(BW)
        self._dependents |= {(BW, s): [each for each in self._dependents[B, s] if each.op == B] for s in stages}
        self._missing = {(op, m): len(ranks) for op in (S, T) for m in microbatches}
        self._latest = {(op, m): 0.0 for op in (S, T) for m in microbatches}

    def is_ready(self, action: Action) -> bool:
        return super().is_ready(_half(action))

    def start(self, rank: int, step: Step) -> tuple[float, list[tuple[float, int]]]:
        """Run `step` now; return its end, and the times at which it makes something ready on which ranks."""
        actions = flatten((step,))
        if isinstance(step, Pair):
            time = self.costs.pair_time(step.forward.stage, step.backward.stage, step.backward.op)
        else:
            time = self.time(step)
        for action in actions:
            self.started[_half(action).op, action.stage] += 1
            self._hold(rank, action)
        end = self.now + time
        return end, [wake for action in actions for wake in self._finish(rank, action, end)]

    def _hold(self, rank: int, action: Action) -> None:
        if action.op in self._memory:
            self.memory[rank] += self.added(action)
        self.states[rank] += (action.op == S) - (action.op == T)

    def _finish(self, rank: int, action: Action, end: float) -> Iterator[tuple[float, int]]:
        op, stage, microbatch = action
        if op in (S, T):
            yield from self._shard_done(op, microbatch, end)
        elif op == F and stage == self.last:  # its backward waits for the shards
            yield from self._shards(S, microbatch, end + self.costs.delay(F))
        else:
            yield from self._delivered(rank, action, end)

    def _shards(self, op: str, microbatch: int, time: float) -> Iterator[tuple[float, int]]:
        for rank, shard in enumerate(self.shard_of):
            self.ready_at[op, shard, microbatch] = time
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
            self.ready_at[B, self.last, microbatch] = time
            yield time, self.placement.rank(self.last)


def _half(action: Action) -> Action:
    """BW makes and needs what B does."""
    return action._replace(op=B) if action.op == BW else action
