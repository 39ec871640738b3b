"""Forward-backward improvement of an order.

An order is dispatched backward in time, the passes that end last first, then forward again, those
first that the backward order starts earliest: every pass is as urgent as what still depends on it.
Some noise on the priorities and changing patience lead to other orders; it comes from a fixed seed,
so a search finds the same order every time.
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


def forward_backward_pass(
    problem: SchedulingProblem, order: Order, patience: float = FIRST_PATIENCE
) -> Order | None:
    """Returns the order dispatched backward in time or forward again, whichever is shorter; None if
    none fits."""
    backward = Direction(problem, backward=True).dispatch(
        [-end for end in problem.ends(order)], patience
    )
    if backward is None:
        return None
    forward = Direction(problem, backward=False).dispatch([-end for end in backward.end], patience)
    if forward and forward.value <= backward.value:
        return forward.order
    return [passes[::-1] for passes in backward.order]


class ForwardBackwardImprover:
    """Improves one order of a problem; `best_order` is None until one below `best` is found."""

    def __init__(self, problem: SchedulingProblem, order: Order, best: float, seed: int) -> None:
        self.problem, self.best = problem, best
        self.directions = Direction(problem, backward=True), Direction(problem, backward=False)
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
            noise, forward = (
                self.generator.choice(NOISE) * self.unit,
                self.generator.choice((False, True)),
            )
            priority = self.begin if forward else [-end for end in self.end]
            first = self._dispatch(forward, self._add_noise(priority, noise) if noise else priority)
            second = first and self._dispatch(not forward, [-end for end in first.end])
            for dispatched, direction in ((first, forward), (second, not forward)):
                if dispatched:
                    self._continue_from(dispatched, direction)

    def _add_noise(self, priority: Sequence[float], size: float) -> list[float]:
        few, noise = self.generator.choice((False, True)), self.generator.random
        if few:
            return [
                value + 2 * size * (noise() - 0.5) if noise() < FEW else value for value in priority
            ]
        return [value + size * noise() for value in priority]

    def _dispatch(self, forward: bool, priority: Sequence[float]) -> DispatchedOrder | None:
        dispatched = self.directions[forward].dispatch(priority, self.generator.choice(PATIENCE))
        if dispatched and dispatched.value < self.best:
            self.best = dispatched.value
            self.best_order = (
                dispatched.order if forward else [passes[::-1] for passes in dispatched.order]
            )
        return dispatched

    def _continue_from(self, dispatched: DispatchedOrder, forward: bool) -> None:
        """Takes the times of an order for the next priorities, unless it is much longer than the
        one before."""
        _, end, value = dispatched
        if value <= self.value + self.generator.expovariate(1) * FORGIVEN * self.unit:
            self.value, self.begin, self.end = value, [*map(sub, end, self.problem.time)], end
            if not forward:  # its ends are starts
                self.begin, self.end = (
                    [value - time for time in times] for times in (end, self.begin)
                )
