"""Improving an order by turning time around.

An order is dispatched backward in time, the passes that end last first, then forward again, those first that the
backward order begins earliest: every pass is as urgent as what still depends on it. A few turns, each of which costs as
much as some hundred moves of the annealing, bring an order that was made for other costs close to one that fits these.
Some noise on the priorities and changing patience lead to other orders.
"""

import math
import random
from collections.abc import Callable, Sequence

from zbcompile.schedules.searching.annealing import draws_of
from zbcompile.schedules.searching.clock import Clock, Order
from zbcompile.schedules.searching.dispatcher import Direction, Dispatched
from zbcompile.schedules.searching.problem import Problem, Words

PATIENCE = (0, 0.3, 0.5, 0.8, 1)
NOISE = (0, 0.1, 0.5, 1, 2, 4)  # on priorities, in mean passes
FORGIVEN = 0.1  # how much longer, in mean passes on average, an order to go on from may be
STALE = 25  # turns without gain until another order is started from
WORTH = 50  # a pair of turns takes as long as a move for each so many passes


class Justifier:
    """One search from several orders of a problem; `best_words` is None until something below `best` is found."""

    def __init__(self, problem: Problem, starts: Sequence[Words], best: float, seed: int) -> None:
        self.problem, self.starts, self.best = problem, starts, best
        self.forward, self.backward = Direction(problem, backward=False), Direction(problem, backward=True)
        self.unit = sum(problem.time) / len(problem.time)
        self.generator = random.Random(seed)
        self.best_words: Words | None = None
        self._restart(0)

    def run(self, progress: Callable[[int], float], target: float) -> int:
        """Turn until `progress(moves)` is 1 or the objective is `target`; returns how many moves that was worth."""
        turns, each = 0, max(1, len(self.problem.time) // WORTH)
        while self.best > target and progress(turns * each) < 1:
            turns += 1
            self._turn()
            if self.stale > STALE:
                self._restart(self.started + 1)
        return turns * each

    def _restart(self, number: int) -> None:
        """Go on from the next of the orders; behind the last of them from the best that was found."""
        self.started, self.stale, self.value = number, 0, math.inf
        if number < len(self.starts) or self.best_words is None:
            self.base = self._begins(self.starts[number % len(self.starts)])
        else:
            self.base = self._begins(self.best_words)

    def _begins(self, words: Words) -> list[float]:
        clock = Clock(Order(self.problem, words), *draws_of(self.problem, None)[0])
        return [end - time for end, time in zip(clock.end, clock.time, strict=True)]

    def _turn(self) -> None:
        choice, noise = self.generator.choice, self.generator.random
        reach = choice(NOISE) * self.unit
        priority = [begin + reach * noise() for begin in self.base] if reach else self.base
        self.stale += 1
        forward = self.forward.dispatch(priority, choice(PATIENCE))
        if forward is None:
            return
        backward = self.backward.dispatch([-end for end in forward.end], choice(PATIENCE))
        self._keep(forward, forward.words)
        if backward is not None:
            self._keep(backward, [word[::-1] for word in backward.words])
            value = min(forward.value, backward.value)
            if value <= self.value + self.generator.expovariate(1) * FORGIVEN * self.unit:
                self.value, self.base = value, [-end for end in backward.end]

    def _keep(self, found: Dispatched, words: Words) -> None:
        if found.value < self.best:
            self.best, self.best_words, self.stale = found.value, words, 0
