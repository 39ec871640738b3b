"""ZB-V for passes that take unequal times: waves of backwards and forwards, as the paper's authors schedule them.

After a warm-up, every rank takes in turn one backward and one forward. A weight gradient is put before one of them if
it fits into the time that the rank would wait, or if waiting would make the rank the idlest of all. Further attempts
know how long every rank was idle in the last one. They end when the idlest rank is not idle for less time.
"""

from collections import deque
from collections.abc import Iterator

from zbcompile.schedules.generators.task import Orders, Task
from zbcompile.schedules.ir.actions import Action, B, F, W
from zbcompile.schedules.ir.dependencies import needs


class StuckWave(Exception):
    """A wave in which a pass has no memory, or waits for one that no rank has begun."""


def greedy_orders(task: Task) -> Iterator[Orders]:
    """The orders of four rules: whether weight gradients are put before backwards, and before forwards, that wait."""
    for fill_b in (True, False):
        for fill_f in (True, False):
            idle, best = [0.0] * task.ranks, None
            while True:
                attempt = _Waves(task, fill_b, fill_f, idle if best else None)
                try:
                    attempt.run()
                except StuckWave:
                    break
                if best and max(attempt.idle) >= max(best.idle):
                    break
                best, idle = attempt, attempt.idle
            if best:
                yield tuple(map(tuple, best.orders))


class _Waves:
    """One attempt: clocks, memory and orders of all ranks. `known`: how long each was idle in the attempt before."""

    def __init__(self, task: Task, fill_b: bool, fill_f: bool, known: list[float] | None) -> None:
        self.task, self.costs, self.ranks, self.many = task, task.costs_or_equal, task.ranks, task.microbatches
        self.fill_b, self.fill_f, self.known = fill_b, fill_f, known
        self.times = {op: self.costs.times(op) for op in (F, B, W)}
        self.added = {op: self.costs.added(op) for op in (F, B, W)}
        activation = self.costs.activation
        self.limit = [self.ranks * (activation[r] + activation[self.up(r)]) * (1 + 1e-9) for r in range(self.ranks)]
        self.now, self.idle, self.held = ([0.0] * self.ranks for _ in range(3))
        self.done = {(op, stage): 0 for op in (F, B, W) for stage in range(2 * self.ranks)}
        self.end: dict[Action, float] = {}
        self.waiting: list[deque[int]] = [deque() for _ in range(self.ranks)]  # stages whose W has not run
        self.orders: list[list[Action]] = [[] for _ in range(self.ranks)]

    def up(self, rank: int) -> int:
        """The stage of a rank on the way up."""
        return 2 * self.ranks - 1 - rank

    def run(self) -> None:
        self._warm_up()
        for _ in range(2 * self.many):
            self._backwards()
            for rank in range(self.ranks):
                self._forward(rank)
        for rank in range(self.ranks):
            while self.waiting[rank]:
                self._put_weight(rank)

    def _warm_up(self) -> None:
        for rank in range(self.ranks):
            self._put(rank, F, rank)
        for rank in reversed(range(self.ranks)):
            arrives, each = self._arrival(F, self.up(rank)), self.added[F][rank]
            while (
                self.held[rank] + each * (2 + 2 * rank) <= self.limit[rank]
                and self.now[rank] + self.times[F][rank] <= arrives
                and self.done[F, rank] < self.many
            ):
                for other in range(rank + 1):
                    self._put(other, F, other)
            self._put(rank, F, self.up(rank))
        self._fill()

    def _fill(self) -> None:
        """More forwards, down and up in turn, until no rank has run fewer than the one before it."""
        upward = False
        for rank in range(1, self.ranks):
            while self._forwards(rank) < self._forwards(rank - 1) or (
                self.done[F, self.up(rank)] <= self.done[F, self.up(rank - 1)] < self.many
            ):
                for other in reversed(range(rank, self.ranks)):
                    stage = self.up(other) if upward else other
                    if self.done[F, stage] < self.many:
                        self._put(other, F, stage)
                upward = not upward

    def _forwards(self, rank: int) -> int:
        return self.done[F, rank] + self.done[F, self.up(rank)]

    def _backwards(self) -> None:
        down: list[int] = []
        up: list[int] = []
        for rank in range(self.ranks):
            self._make_room(rank, B, rank)
            first, second = self.done[B, self.up(rank)], self.done[B, rank]
            ready = second < first and (rank == self.ranks - 1 or self._arrival(B, rank) < float("inf"))
            (down if ready or first == self.many else up).append(rank)
        for rank in reversed(down):
            self._put_waiting(rank, B, rank, True)
        for rank in up:
            self._put_waiting(rank, B, self.up(rank), self.fill_b)

    def _forward(self, rank: int) -> None:
        down, up = self.done[F, rank], self.done[F, self.up(rank)]
        if up >= self.many:
            return
        if up < down and self._arrival(F, self.up(rank)) < float("inf"):
            stage = self.up(rank)
        elif down < self.many and self._arrival(F, rank) < float("inf"):
            stage = rank
        else:
            return
        self._make_room(rank, F, stage)
        self._put_waiting(rank, F, stage, self.fill_f)

    def _make_room(self, rank: int, op: str, stage: int) -> None:
        while self.held[rank] + self.added[op][stage] > self.limit[rank]:
            self._put_weight(rank)

    def _put_waiting(self, rank: int, op: str, stage: int, fill: bool) -> None:
        """Put a pass, and before it the weight gradients that the time until it can begin has room for."""
        arrives, waiting = self._arrival(op, stage), self.waiting[rank]
        while waiting and arrives >= self.now[rank] + self.times[W][waiting[0]]:
            self._put_weight(rank)
        if fill and waiting and arrives - self.now[rank] > self._allowed(rank) - self.idle[rank]:
            self._put_weight(rank)
        self._put(rank, op, stage)

    def _allowed(self, rank: int) -> float:
        """How long a rank may be idle in all."""
        return max(*self.idle, max(self.known) - self.known[rank] if self.known else 0)

    def _arrival(self, op: str, stage: int) -> float:
        """When the next microbatch of a pass can begin; infinity if what it waits for has not run."""
        m, here = self.done[op, stage], self.task.placement.rank(stage)
        arrivals = [0.0]
        for other, at in needs(op, stage, 2 * self.ranks):
            hop = self.costs.hop(min(stage, at), self.task.placement.rank(at), here)
            arrivals.append(self.end.get(Action(other, at, m), float("inf")) + hop)
        return max(arrivals)

    def _put_weight(self, rank: int) -> None:
        if not self.waiting[rank]:
            raise StuckWave
        self._put(rank, W, self.waiting[rank].popleft())

    def _put(self, rank: int, op: str, stage: int) -> None:
        arrives, m = self._arrival(op, stage), self.done[op, stage]
        self.held[rank] += self.added[op][stage]
        if arrives == float("inf") or m == self.many or self.held[rank] > self.limit[rank]:
            raise StuckWave
        if self.done[F, rank]:
            self.idle[rank] += max(0.0, arrives - self.now[rank])
        action = Action(op, stage, m)
        self.now[rank] = self.end[action] = max(self.now[rank], arrives) + self.times[op][stage]
        self.done[op, stage] += 1
        self.orders[rank].append(action)
        if op == B:
            self.waiting[rank].append(stage)
