"""Forward-backward improvement of an order.

An order is dispatched backward in time, the passes that end last first, then forward again, those first that the
backward order starts earliest: every pass is as urgent as what still depends on it. Some noise on the priorities and
changing patience lead to other orders; it comes from a fixed seed, so a search finds the same order every time.
"""

import math
import random
from collections.abc import Sequence
from operator import sub

from zbcompile.schedules.searching.dispatcher import Direction, DispatchedOrder
from zbcompile.schedules.searching.problem import Order, SchedulingProblem

PATIENCE = (0, 0.3, 0.5, 0.8, 1)
FIRST_PATIENCE = 0.5
NOISE = (0, 0.1, 0.5, 1, 2, 4)  # on priorities, in mean passes
FEW = 0.1  # the share of passes that get noise, if not all do
FORGIVEN = 0.1  # how much longer, in mean passes on average, an order to continue from may be


def forward_backward_pass(problem: SchedulingProblem, order: Order, patience: float = FIRST_PATIENCE) -> Order | None:
    """Returns the order dispatched backward in time or forward again, whichever is shorter; None if none fits."""
    turned = Direction(problem, backward=True).dispatch([-end for end in problem.ends(order)], patience)
    if turned is None:
        return None
    again = Direction(problem, backward=False).dispatch([-end for end in turned.end], patience)
    return again.order if again and again.value <= turned.value else [own[::-1] for own in turned.order]


class ForwardBackwardImprover:
    """Improves one order of a problem; `best_order` is None until one below `best` is found."""

    def __init__(self, problem: SchedulingProblem, order: Order, best: float, seed: int) -> None:
        self.problem, self.best = problem, best
        self.forward, self.backward = Direction(problem, backward=False), Direction(problem, backward=True)
        self.unit = sum(problem.time) / len(problem.actions)
        self.generator = random.Random(seed)
        self.best_order: Order | None = None
        self.value = math.inf
        self.end = problem.ends(order)
        self.begin = [*map(sub, self.end, problem.time)]

    def run(self, passes: int, target: float) -> None:
        """Makes `passes` forward-backward passes, fewer if the objective reaches `target`."""
        for _ in range(passes):
            if self.best <= target:
                return
            self._improve()

    def _improve(self) -> None:
        choice = self.generator.choice
        reach = choice(NOISE) * self.unit
        forward = choice((False, True))
        priority = self.begin if forward else [-end for end in self.end]
        first = self._dispatched(forward, self._disturbed(priority, reach) if reach else priority)
        second = first and self._dispatched(not forward, [-end for end in first.end])
        for found, ahead in ((first, forward), (second, not forward)):
            if found and found.value <= self.value + self.generator.expovariate(1) * FORGIVEN * self.unit:
                self._continue_from(found, ahead)

    def _disturbed(self, priority: Sequence[float], reach: float) -> list[float]:
        few, noise = self.generator.choice((False, True)), self.generator.random
        if few:
            return [each + 2 * reach * (noise() - 0.5) if noise() < FEW else each for each in priority]
        return [each + reach * noise() for each in priority]

    def _dispatched(self, forward: bool, priority: Sequence[float]) -> DispatchedOrder | None:
        way = self.forward if forward else self.backward
        found = way.dispatch(priority, self.generator.choice(PATIENCE))
        if found and found.value < self.best:
            self.best = found.value
            self.best_order = found.order if forward else [own[::-1] for own in found.order]
        return found

    def _continue_from(self, found: DispatchedOrder, forward: bool) -> None:
        self.value, begin = found.value, [*map(sub, found.end, self.problem.time)]
        self.begin, self.end = begin, found.end
        if not forward:  # its ends are starts
            self.begin, self.end = ([found.value - time for time in times] for times in (found.end, begin))
