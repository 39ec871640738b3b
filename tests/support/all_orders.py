"""All orders of a small step, one stage a rank: whether any is shorter than some time.

A step is followed pass by pass. Of the states with equally many passes of each letter done those stay of which no other
is as early in everything: when ranks are free, when results arrive that nobody has taken yet.
"""

from collections.abc import Iterator
from itertools import product

from zbcompile.schedules import Costs

State = tuple[
    tuple[float, ...], tuple[tuple[float, ...], ...]
]  # when ranks are free; results of F, then of B, by stage
EQUAL = 1 + 1e-9


class AllOrders:
    """The orders of `microbatches` within a `limit` on every rank; messages are free."""

    def __init__(self, costs: Costs, microbatches: int, limit: float) -> None:
        self.costs, self.microbatches, self.limit = costs, microbatches, limit * EQUAL
        self.ranks = range(costs.stages)
        self.times = costs.forward, costs.backward, costs.weight
        forward, backward, last = costs.forward, costs.backward, costs.weight[0]
        self.behind_f = [sum(forward[s + 1 :]) + sum(backward) + last for s in self.ranks]
        self.behind_b = [sum(backward[:s]) + last for s in self.ranks]

    def is_any_shorter(self, than: float) -> bool:
        count = len(self.ranks)
        level: dict[tuple[int, ...], list[State]] = {(0,) * 3 * count: [((0.0,) * count, ((),) * 2 * count)]}
        for _ in range(3 * count * self.microbatches):
            found: dict[tuple[int, ...], dict[tuple[float, ...], State]] = {}
            for done, states in level.items():
                for stage, op in product(self.ranks, range(3)):
                    if self._may_run(done, stage, op):
                        at = 3 * stage + op
                        more = *done[:at], done[at] + 1, *done[at + 1 :]
                        for state in states:
                            for after in self._after(state, stage, op):
                                if self._least(more, after[0]) < than:
                                    _keep(found.setdefault(more, {}), after)
            level = {done: list(each.values()) for done, each in found.items()}
        return bool(level)

    def _may_run(self, done: tuple[int, ...], stage: int, op: int) -> bool:
        """Whether a pass is left whose own stage is so far, and whether the rank has the memory for it."""
        counts = list(done[3 * stage : 3 * stage + 3])
        counts[op] += 1
        f, b, w = counts
        held = (f - b) * self.costs.activation[stage] + (b - w) * self.costs.residue[stage]
        return self.microbatches >= f >= b >= w and held <= self.limit

    def _after(self, state: State, stage: int, op: int) -> Iterator[State]:
        """The state behind a pass, if what it takes from another stage was begun."""
        free, waiting, last = state[0], list(state[1]), len(self.ranks) - 1
        begin, count = free[stage], len(self.ranks)
        source = {0: stage - 1 if stage else None, 1: count + stage + 1 if stage < last else None, 2: None}[op]
        if source is not None:
            if not waiting[source]:
                return
            begin = max(begin, waiting[source][0])
            waiting[source] = waiting[source][1:]
        end = begin + self.times[op][stage]
        if (op == 0 and stage < last) or (op == 1 and stage):
            waiting[op * count + stage] = *waiting[op * count + stage], end
        yield (*free[:stage], end, *free[stage + 1 :]), tuple(waiting)

    def _least(self, done: tuple[int, ...], free: tuple[float, ...]) -> float:
        """What the step takes at least: each rank's own work, and what follows on its last F and B."""
        found = 0.0
        for s in self.ranks:
            f, b, w = (self.microbatches - done[3 * s + op] for op in range(3))
            forward, backward, weight = (count * times[s] for count, times in zip((f, b, w), self.times, strict=True))
            ends = [free[s] + forward + backward + weight]
            ends += [free[s] + forward + self.behind_f[s]] * (f > 0) + [free[s] + backward + self.behind_b[s]] * (b > 0)
            found = max(found, *ends)
        return found


def _keep(known: dict[tuple[float, ...], State], state: State) -> None:
    """Keep a state, and of the others those that it is not as early as."""
    flat = (*state[0], *(at for each in state[1] for at in each))
    if not any(all(a <= b for a, b in zip(other, flat, strict=True)) for other in known):
        for other in [each for each in known if all(a <= b for a, b in zip(flat, each, strict=True))]:
            del known[other]
        known[flat] = state
