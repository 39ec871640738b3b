"""A step to be ordered, in flat lists: every pass is a number, so that a search can try thousands of orders a second.

Passes of one letter (an operation on a stage) run in order of their microbatches: where stages are alike for all
microbatches, as the costs say, no other order is shorter, and weight gradients must accumulate in this one. So a rank's
order is a word over its letters, and the k-th occurrence of a letter is its k-th microbatch.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from zbcompile.schedules.ir.actions import BW, Action, B, F, S, T, W, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.dependencies import needs
from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.ir.schedule import Schedule

ROUNDING = 1 + 1e-9  # sums of sizes count as equal up to rounding
MANY = 1500  # passes above which a search of some seconds has no time to recover from much disorder,
LARGE = 10_000  # above which what is done for several limits, or many layouts, has to be quick,
HUGE = 20_000  # and above which there is no time to look at single ones
Words = list[list[int]]  # by rank, the passes in the order in which it runs them


@dataclass(frozen=True, eq=False)
class Problem:
    """`microbatches` on `placement` under `costs`, within `limits` (one per rank, `None`: none).

    `barrier`: the objective is the makespan, else the longest own span of a rank. `barriers`: what the last backward
    waits for if the costs have vocabulary passes (see `Schedule`).
    """

    placement: Placement
    microbatches: int
    costs: Costs
    limits: tuple[float, ...] | None = None
    barrier: bool = True
    barriers: int = 1

    @property
    def finite(self) -> bool:
        """Whether all that precedes a pass and all that follows it add up to what a float can be."""
        delays = sum(delay for waits in self.waits for _, delay in waits)
        return 2 * (sum(self.time) + sum(map(abs, self.added)) + delays) < math.inf

    @cached_property
    def sharded(self) -> bool:
        """Whether every rank has a shard of the vocabulary."""
        return any((*self.costs.vocab_s, *self.costs.vocab_t))

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """The stages that name the shards, by rank."""
        ranks = range(self.placement.ranks) if self.sharded else ()
        return tuple(self.placement.stages_of(rank)[0] for rank in ranks)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All passes by their numbers: letter after letter, microbatches ascending."""
        stages = [(op, stage) for op in (F, B, W) for stage in range(self.placement.stages)]
        letters = stages + [(op, shard) for op in (S, T) for shard in self.shards]
        return tuple(Action(op, stage, m) for op, stage in letters for m in range(self.microbatches))

    @cached_property
    def number(self) -> dict[Action, int]:
        return {action: number for number, action in enumerate(self.actions)}

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """The rank of each pass, by number; only with two model copies does it depend on the microbatch."""
        half = self.microbatches // 2 if self.placement.kind == "dual" else self.microbatches
        return tuple(self.placement.rank(stage, int(m >= half)) for _, stage, m in self.actions)

    @cached_property
    def letter(self) -> tuple[int, ...]:
        """Passes of one rank with the same letter keep their order."""
        return tuple(number // self.microbatches for number in range(len(self.actions)))

    @cached_property
    def time(self) -> tuple[float, ...]:
        times = {op: self.costs.times(op) for op in {action.op for action in self.actions}}
        return tuple(times[op][stage] for op, stage, _ in self.actions)

    @cached_property
    def added(self) -> tuple[float, ...]:
        """What each pass adds to the memory of its rank."""
        added = {op: self.costs.added(op) for op in {action.op for action in self.actions}}
        return tuple(added[op][stage] for op, stage, _ in self.actions)

    @cached_property
    def waits(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """What each pass waits for, and how long that takes to arrive. Numbers behind those of the passes stand for
        "every shard has run it": one for each microbatch, which waits for the passes of all shards."""
        waits: list[tuple[tuple[int, float], ...]] = [tuple(self._waits(action)) for action in self.actions]
        for op in (S, T) if self.sharded else ():
            for m in range(self.microbatches):
                waits.append(tuple((self.number[Action(op, shard, m)], 0) for shard in self.shards))
        return tuple(waits)

    def _waits(self, action: Action) -> Iterable[tuple[int, float]]:
        op, stage, m = action
        here = self.rank[self.number[action]]
        reduced = {B: (S, T)[self.barriers - 1] if stage == self.placement.stages - 1 else "", T: S}.get(op, "")
        if reduced and self.sharded:
            yield len(self.actions) + (reduced == T) * self.microbatches + m, self.costs.comm
            return
        for other, at in needs(op, stage, self.placement.stages):
            made = self.number[Action(other, at, m)]
            delay = self.costs.comm if op == S else self.costs.hop(min(stage, at), self.rank[made], here)
            yield made, delay

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """The passes that wait for each pass directly: the inverse of `waits`."""
        users: list[list[int]] = [[] for _ in self.waits]
        for user, needed in enumerate(self.waits):
            for number, _ in needed:
                users[number].append(user)
        return tuple(map(tuple, users))

    @cached_property
    def bounded(self) -> tuple[frozenset[int], ...]:
        """The passes of its own rank that may never come before each pass."""
        found: list[set[int]] = [{u for u in self.after[n] if u < len(self.actions)} for n in range(len(self.actions))]
        for stage in range(self.placement.stages):
            for m in range(self.microbatches):
                found[self.number[Action(F, stage, m)]].add(self.number[Action(B, stage, m)])
        return tuple(frozenset(u for u in users if self.rank[u] == self.rank[n]) for n, users in enumerate(found))

    @cached_property
    def offset(self) -> tuple[float, ...]:
        """By rank: what is added to the end of its last pass for the objective, the largest of these sums."""
        own = [sum(self.costs.optimizer[s] for s in self.placement.stages_of(r)) for r in range(self.placement.ranks)]
        if self.barrier:
            return (max(own),) * self.placement.ranks
        return tuple(time - start for time, start in zip(own, self._starts, strict=True))

    @cached_property
    def _starts(self) -> list[float]:
        """When the first pass of each rank begins: nothing else is there yet, so it is the same in every order."""
        head: list[float] = [0.0] * len(self.actions)
        for stage in range(1, self.placement.stages):
            for m in range(self.microbatches):
                n = self.number[Action(F, stage, m)]
                head[n] = max(head[made] + self.time[made] + delay for made, delay in self.waits[n])
        forwards = [(self.rank[n], head[n]) for n, action in enumerate(self.actions) if action.op == F]
        return [min(at for r, at in forwards if r == rank) for rank in range(self.placement.ranks)]

    def words(self, schedule: Schedule) -> Words | None:
        """The orders of a schedule with pairs and BW opened; None if the memory does not hold them."""
        words = [self.numbered(flatten(order), rank) for rank, order in enumerate(schedule.orders)]
        return words if self.fits(words) else None

    def numbered(self, order: Sequence[Action], rank: int) -> list[int]:
        """One rank's passes as numbers, each letter's microbatches in ascending order."""
        reached: dict[tuple[str, int], int] = {}
        word: list[int] = []
        opened = (each for a in order for each in ((a._replace(op=B), a._replace(op=W)) if a.op == BW else (a,)))
        for op, stage, _ in opened:
            second_copy = self.placement.kind == "dual" and self.placement.rank(stage) != rank
            k = reached.get((op, stage), self.microbatches // 2 if second_copy else 0)
            reached[op, stage] = k + 1
            word.append(self.number[Action(op, stage, k)])
        return word

    def fits(self, words: Words) -> bool:
        return self.limits is None or all(
            max(accumulate(map(self.added.__getitem__, word)), default=0) <= limit * ROUNDING
            for word, limit in zip(words, self.limits, strict=True)
        )

    def schedule(self, words: Words, name: str = "auto") -> Schedule:
        orders = tuple(tuple(map(self.actions.__getitem__, word)) for word in words)
        return Schedule(name, self.placement, self.microbatches, orders, self.barriers)
