"""Simulated annealing over words: shift a pass of the critical path, keep what is shorter and sometimes what is not."""

import math
import random
from collections.abc import Callable

from zbcompile.schedules.searching.clock import Move, Order, PassTimes
from zbcompile.schedules.searching.problem import HUGE, MANY, Problem, Words

HOT, COLD = 0.3, 0.005  # temperatures at the start and at the end, in mean passes
MILD = 0.05  # where to start above MANY passes: there is no time to recover from much disorder
LATE = 200  # above HUGE passes only so many at the end of the critical path are moved: little depends on them
CRITICAL = 0.85  # share of moves that shift a pass of the critical path
EVENNESS = 0.01  # how much the mean end of all ranks adds to the objective: it leads across plateaus
LOOK = 64  # moves between two readings of the clock


class Annealer:
    """Simulated annealing from one order."""

    def __init__(self, problem: Problem, words: Words, seed: int) -> None:
        self.problem = problem
        self.order = Order(problem, words)
        self.clock = PassTimes(self.order)
        self.generator = random.Random(seed)
        self.unit = sum(problem.time) / len(problem.time)
        self.path: list[int] = []
        self.value, self.score = self._judge()
        self.best = self.value
        self.best_words: Words | None = None

    def run(self, progress: Callable[[int], float], target: float) -> int:
        """Make moves until `progress(moves)` reaches 1 or the objective reaches `target`. Returns the number of moves;
        `best_words` has the best order, or None if that is the given one."""
        hot = HOT if len(self.problem.time) <= MANY else MILD
        moves, temperature = 0, hot * self.unit
        look = LOOK if len(self.problem.time) <= MANY else 1  # above that a move takes long
        while self.best > target:
            if moves % look == 0:
                done = progress(moves)
                if done >= 1:
                    break
                temperature = self.unit * hot * (COLD / hot) ** done
            moves += 1
            self._step(temperature)
        return moves

    def _step(self, temperature: float) -> None:
        move = self.order.shifted(self._pick(), self._distance())
        if move is None:
            return
        allowed = self.score - temperature * math.log(1 - self.generator.random())
        back = self.order.make(move)
        if self._settle(move, allowed):
            value, score = self._judge()
            if score <= allowed:
                self._accept(value, score)
                return
        self._take_back(back)

    def _accept(self, value: float, score: float) -> None:
        self.value, self.score, self.path = value, score, []
        self.clock.log = []
        if value < self.best:
            self.best, self.best_words = value, [list(word) for word in self.order.words]

    def _settle(self, move: Move, allowed: float) -> bool:
        stop = move.start + len(move.passes)
        word = self.order.words[move.rank]
        changed = [*move.passes, *word[stop : stop + 1]]
        self.clock.retail(move.rank, move.start, stop)
        return self.clock.settle(changed, allowed)

    def _take_back(self, back: Move) -> None:
        self.order.make(back)
        self.clock.undo()
        self.clock.retail(back.rank, back.start, back.start + len(back.passes))

    def _judge(self) -> tuple[float, float]:
        """The objective, and the score by which moves are accepted."""
        last = self.clock.last()
        value = max(last)
        return value, value + EVENNESS * sum(last) / len(last)

    def _pick(self) -> int:
        draw = self.generator.random
        passes = len(self.problem.time)
        if draw() >= CRITICAL and passes <= HUGE:
            return int(draw() * passes)
        if not self.path:
            self.path = [
                n for n in self.clock.critical()[: LATE if passes > HUGE else None] if n < passes
            ]  # from its end
        return self.path[int(draw() * len(self.path))]

    def _distance(self) -> int:
        draw = self.generator.random
        kind = draw()
        reach = 1 if kind < 0.5 else 4 if kind < 0.8 else 40
        far = 1 + int(draw() * reach)
        return far if draw() < 0.5 else -far
