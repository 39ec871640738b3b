"""Orders that change by one move at a time, and clocks that time again only the passes that a move affects.

`ends_of` in `tests/support/plain_clock.py` computes the same times anew, in ten lines.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from zbcompile.schedules.searching.problem import ROUNDING, Problem, Words

PATIENCE = 4  # times that all passes may be timed anew in one evaluation; more means a cycle


class Move(NamedTuple):
    """The passes of `rank` from place `start` on become `passes`."""

    rank: int
    start: int
    passes: list[int]


class Order:
    """The current order of every rank: what precedes and follows each pass, and what the rank holds after it."""

    def __init__(self, problem: Problem, words: Words) -> None:
        self.problem = problem
        self.words = [list(word) for word in words]
        self.nothing = len(problem.waits)  # stands before the first and behind the last pass of a rank
        self.place = [0] * self.nothing
        self.before = [self.nothing] * self.nothing
        self.behind = [self.nothing] * (self.nothing + 1)
        self.held: list[float] = [0.0] * (self.nothing + 1)
        self.limits = [limit * ROUNDING for limit in problem.limits or ()]
        for rank, word in enumerate(self.words):
            self._link(rank, 0, len(word))

    def _link(self, rank: int, start: int, stop: int) -> None:
        word = self.words[rank]
        last = word[start - 1] if start else self.nothing
        for index in range(start, stop):
            n = word[index]
            self.place[n], self.before[n], self.behind[last] = index, last, n
            self.held[n] = self.held[last] + self.problem.added[n]
            last = n
        following = word[stop] if stop < len(word) else self.nothing
        self.behind[last] = following
        if following != self.nothing:
            self.before[following] = last

    def shifted(self, n: int, by: int) -> Move | None:
        """The move that shifts pass n by some places in its rank's word (negative: to an earlier one); None if that is
        not allowed or changes nothing. Of passes with one letter the earlier microbatch stays in front."""
        letter, bounded = self.problem.letter, self.problem.bounded
        rank, here = self.problem.rank[n], self.place[n]
        word = self.words[rank]
        there = min(max(here + by, 0), len(word) - 1)
        step = 1 if there > here else -1
        passes, carried = [], n
        for index in range(here + step, there + step, step):
            other = word[index]
            if letter[other] == letter[carried]:
                carried, other = other, carried
            elif (other in bounded[carried]) if step > 0 else (carried in bounded[other]):
                return None
            passes.append(other)
        passes.append(carried)
        start, stop = min(here, there), max(here, there) + 1
        move = Move(rank, start, passes[::step])
        return move if move.passes != word[start:stop] and self._holds(move) else None

    def _holds(self, move: Move) -> bool:
        """Whether the rank's memory suffices for a move."""
        if not self.limits:
            return True
        added, limit, word = self.problem.added, self.limits[move.rank], self.words[move.rank]
        held = self.held[word[move.start - 1]] if move.start else 0
        for n in move.passes:
            held += added[n]
            if held > limit:
                return False
        return True

    def make(self, move: Move) -> Move:
        """Apply a move; returns the move that undoes it."""
        rank, start, passes = move
        word, stop = self.words[rank], start + len(passes)
        old = word[start:stop]
        word[start:stop] = passes
        self._link(rank, start, stop)
        return Move(rank, start, old)


class PassTimes:
    """When every pass of an order ends.

    `tail[n]` is the least that follows pass n: the rest of its rank's word, and the rank's `offset`. An evaluation
    stops at a pass that ends too late for its tail.
    """

    def __init__(self, order: Order) -> None:
        problem = order.problem
        self.order, self.problem = order, problem
        self.passes = len(problem.actions)
        self.time: list[float] = [*problem.time, *(0,) * (len(problem.waits) - self.passes), 0]
        self.wait = [waits[0][0] if waits else order.nothing for waits in problem.waits]
        self.delay = [waits[0][1] if waits else 0.0 for waits in problem.waits]
        self.end: list[float] = [0.0] * (order.nothing + 1)
        self.tail: list[float] = [0.0] * (order.nothing + 1)
        self.log: list[tuple[int, float]] = []
        for rank, word in enumerate(order.words):
            self.retail(rank, 0, len(word))
        self.complete = self._run()

    def retail(self, rank: int, start: int, stop: int) -> None:
        """Set the tails of a stretch of a rank's word."""
        word, tail, time = self.order.words[rank], self.tail, self.time
        left = tail[word[stop]] + time[word[stop]] if stop < len(word) else self.problem.offset[rank]
        for index in range(stop - 1, start - 1, -1):
            n = word[index]
            tail[n] = left
            left += time[n]

    def _run(self) -> bool:
        """Time all passes, each after what it waits for; False if some wait for each other."""
        before, behind, after = self.order.before, self.order.behind, self.problem.after
        missing = [len(w) + (before[n] != self.order.nothing) for n, w in enumerate(self.problem.waits)]
        ready = [n for n, count in enumerate(missing) if not count]
        for n in ready:
            self.end[n] = self._time(n)
            for user in (*after[n], behind[n]):
                if user != self.order.nothing:
                    missing[user] -= 1
                    if not missing[user]:
                        ready.append(user)
        return len(ready) == len(missing)

    def _time(self, n: int) -> float:
        if n >= self.passes:
            return max(self.end[made] for made, _ in self.problem.waits[n])
        return max(self.end[self.order.before[n]], self.end[self.wait[n]] + self.delay[n]) + self.time[n]

    def settle(self, changed: Sequence[int], latest: float) -> bool:
        """Time these passes again, in this order, and all that depend on them. False, with the evaluation unfinished,
        as soon as the objective must exceed `latest`; `undo` reverts either."""
        end, tail, time, wait, delay = self.end, self.tail, self.time, self.wait, self.delay
        before, behind, nothing = self.order.before, self.order.behind, self.order.nothing
        after, passes = self.problem.after, self.passes
        self.log = log = []
        most = PATIENCE * passes
        first, queued = iter(changed), set(changed)
        queue: list[tuple[float, int]] = []
        while True:
            n = next(first, -1)
            if n < 0:
                if not queue:
                    return True
                n = heappop(queue)[1]
            queued.discard(n)
            if n < passes:
                now, arrival = end[before[n]], end[wait[n]] + delay[n]
                now = (now if now > arrival else arrival) + time[n]
            else:
                now = self._time(n)
            old = end[n]
            if now == old:
                continue
            log.append((n, old))
            end[n] = now
            if now + tail[n] > latest or len(log) > most:
                return False
            following = behind[n]
            if following != nothing and following not in queued:
                queued.add(following)
                heappush(queue, (end[following], following))
            for user in after[n]:
                if user not in queued:
                    queued.add(user)
                    heappush(queue, (end[user], user))

    def undo(self) -> None:
        for n, old in reversed(self.log):
            self.end[n] = old
        self.log = []

    def last(self) -> list[float]:
        """The end of the last pass of each rank, with the rank's offset."""
        return [self.end[word[-1]] + offset for word, offset in zip(self.order.words, self.problem.offset, strict=True)]

    def critical(self) -> list[int]:
        """The passes, last to first, that determine the objective."""
        last = self.last()
        n = self.order.words[last.index(max(last))][-1]
        path = []
        while n != self.order.nothing:
            path.append(n)
            n = self._held_up(n)
        return path

    def _held_up(self, n: int) -> int:
        """The pass that pass n waited for."""
        if n >= self.passes:
            return max((made for made, _ in self.problem.waits[n]), key=self.end.__getitem__)
        before, wait = self.order.before[n], self.wait[n]
        return before if self.end[before] >= self.end[wait] + self.delay[n] else wait
