"""Improving an order by turning time around.

An order is dispatched backward in time, the passes that end last first, then forward again, those first that the
backward order begins earliest: every pass is as urgent as what still depends on it. A few turns, each of which costs as
much as some hundred moves of the annealing, bring an order that was made for other costs close to one that fits these.
Some noise on the priorities and changing patience lead to other orders.
"""

import math
import random
from collections.abc import Callable, Sequence
from operator import sub

from zbcompile.schedules.searching.clock import Order, PassTimes
from zbcompile.schedules.searching.dispatcher import Direction, DispatchedOrder
from zbcompile.schedules.searching.problem import Problem, Words

PATIENCE = (0, 0.3, 0.5, 0.8, 1)
FIRST_PATIENCE = 0.5  # of the first turn of one microbatch after the other
NOISE = (0, 0.1, 0.5, 1, 2, 4)  # on priorities, in mean passes
FEW = 0.1  # the share of passes that get noise, if not all do
FORGIVEN = 0.1  # how much longer, in mean passes on average, an order to go on from may be
STALE = 25  # turns without gain until another order is started from
WORTH = 100  # moves that take as long as a pair of turns, whatever the size of the step


def turned_around(
    problem: Problem, words: Words, late: Callable[[], bool] = bool, patience: float = FIRST_PATIENCE
) -> Words | None:
    """The shorter of two orders: the given one dispatched backward in time, and that one dispatched forward again,
    unless it is `late()`. None if memory admits no order."""
    clock = PassTimes(Order(problem, words))
    turned = Direction(problem, backward=True).dispatch([-end for end in clock.end], patience)
    if turned is None:
        return None
    again = Direction(problem, backward=False).dispatch([-end for end in turned.end], patience, late)
    return again.words if again and again.value <= turned.value else [word[::-1] for word in turned.words]


class Justifier:
    """A search by turns from several orders of a problem; `best_words` is None until it finds one below `best`."""

    def __init__(self, problem: Problem, starts: Sequence[Words], best: float, seed: int) -> None:
        self.problem, self.starts, self.best = problem, starts, best
        self.forward, self.backward = Direction(problem, backward=False), Direction(problem, backward=True)
        self.unit = sum(problem.time) / len(problem.time)
        self.generator = random.Random(seed)
        self.best_words: Words | None = None
        self._restart(0)

    def run(self, progress: Callable[[int], float], target: float) -> int:
        """Make turns until `progress(moves)` reaches 1 or the objective reaches `target`. Returns the number of moves
        that would have taken as long."""
        turns = 0
        while self.best > target and progress(turns * WORTH) < 1:
            turns += 1
            self._turn()
            if self.stale > STALE:
                self._restart(self.started + 1)
        return turns * WORTH

    def _restart(self, number: int) -> None:
        """Continue from the next starting order; after the last of them, from the best order found."""
        self.started, self.stale, self.value = number, 0, math.inf
        words = self.starts[number] if number < len(self.starts) else self.best_words or self.starts[0]
        clock = PassTimes(Order(self.problem, words))
        self.begin, self.end = [*map(sub, clock.end, self.problem.time)], clock.end

    def _turn(self) -> None:
        choice = self.generator.choice
        reach = choice(NOISE) * self.unit
        forward = choice((False, True))
        priority = self.begin if forward else [-end for end in self.end]
        self.stale += 1
        found = self._dispatched(forward, self._disturbed(priority, reach) if reach else priority)
        again = found and self._dispatched(not forward, [-end for end in found.end])
        for each, ahead in ((found, forward), (again, not forward)):
            if each and each.value <= self.value + self.generator.expovariate(1) * FORGIVEN * self.unit:
                self._go_on_from(each, ahead)

    def _disturbed(self, priority: Sequence[float], reach: float) -> list[float]:
        few, noise = self.generator.choice((False, True)), self.generator.random
        if few:
            return [each + 2 * reach * (noise() - 0.5) if noise() < FEW else each for each in priority]
        return [each + reach * noise() for each in priority]

    def _dispatched(self, forward: bool, priority: Sequence[float]) -> DispatchedOrder | None:
        way = self.forward if forward else self.backward
        found = way.dispatch(priority, self.generator.choice(PATIENCE))
        if found and found.value < self.best:
            self.best, self.stale = found.value, 0
            self.best_words = found.words if forward else [word[::-1] for word in found.words]
        return found

    def _go_on_from(self, found: DispatchedOrder, forward: bool) -> None:
        self.value, begin = found.value, [*map(sub, found.end, self.problem.time)]
        self.begin, self.end = begin, found.end
        if not forward:  # its ends are begins
            self.begin, self.end = ([found.value - time for time in times] for times in (found.end, begin))
