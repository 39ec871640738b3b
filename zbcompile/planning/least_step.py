"""The least that a step takes in a line of stages, whatever its order: cuts, and what each stage recomputes, are chosen
for it within a limit of memory.

A microbatch stays on a rank from its F to its B, while all stages behind run both: a round trip. If `many` microbatches
fit beside each other, as many share a round trip, and then the next ones begin theirs. This is what first ranks, whose
trips are longest, recompute for. From the last rank to the first, the shortest trip from every cut is remembered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zbcompile.compiler.prices import LinePrices
from zbcompile.passes.compile_options import Policy
from zbcompile.schedules import Placement
from zbcompile.schedules.searching.problem import ROUNDING

NEAR = 1e-3  # relative error of the least step
MOST = 8  # times the work of a rank, if all are equally busy, that a step may take
STRIDE = 1.1  # from a step that is too short to the next that is tried


class RankStage(NamedTuple):
    """A stage that a rank may have: its first operation, what it recomputes, seconds of F, B and all passes of a
    microbatch, and how many microbatches fit between F and B, and before W as the last B ends."""

    begin: int
    policy: Policy
    forward: float
    backward: float
    work: float
    many: int
    late: int


Stages = tuple[RankStage, ...]  # from the first rank to the last


@dataclass
class LeastStep:
    """Cuts at some of `edges`, in a step of `microbatches` with `rows` times the rows that were priced; no rank holds
    more than `memory` bytes."""

    prices: LinePrices
    ranks: int
    microbatches: int
    memory: float
    edges: Sequence[int]
    rows: float = 1

    _known: dict[tuple[int, int, Policy], RankStage] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        prices, link, self._end = self.prices, self.prices.link, len(self.prices.line.nodes)
        cuts = {0: (0.0, 0.0, 0.0)} | {e: prices.stages([e], "off", self.rows)[0].seconds for e in self.edges}
        self._before = cuts | {self._end: prices.stages((), "off", self.rows)[0].seconds}  # each cut, by pass
        self._sent = {e: self.rows * prices.line.boundary_bytes(e - 1) for e in self.edges} | {self._end: 0.0}
        hops = {e: link.latency + size / link.bandwidth if link else 0.0 for e, size in self._sent.items()}
        self._hops, self._hop = hops | {self._end: 0.0}, min(hops.values())

    def least(self, policies: Sequence[Policy], slack: float = 0) -> tuple[float, Stages] | None:
        """Seconds that no step is shorter than, and the stages of one that may be as short; None if nothing fits.

        `policies` are what stages may recompute, what keeps least first. With `slack` a round trip takes this share
        longer: ranks wait for each other in the orders that there are.
        """
        low = high = self.microbatches * sum(self._before[self._end]) / self.ranks
        most, found = MOST * low, None
        while found is None:  # stages are priced only when they are short enough for it
            if high > most:
                return None
            low, high = high, high * STRIDE
            found = self._within(high, policies, slack)
        while high > low * (1 + NEAR):
            middle = (low + high) / 2
            better = self._within(middle, policies, slack)
            low, high, found = (middle, high, found) if better is None else (low, middle, better)
        return low, found

    def _within(self, seconds: float, policies: Sequence[Policy], slack: float) -> Stages | None:
        """The stages, with the shortest round trips, of a step of these seconds; None if there are none."""
        begins, trips = [*self._before][:-1], {self._end: (0.0, Stages())}
        for rank in reversed(range(self.ranks)):
            behind, trips = trips, {}
            for begin in begins if rank else (0,):
                left = seconds - self._before[begin][0] - rank * self._hop  # when the first microbatch has come
                held = left - self._before[begin][1] - rank * self._hop  # and until the last one is gone
                for end in (end for end in behind if end > begin):
                    later = behind[end][0] + 2 * self._hops[end]
                    for part in self._parts(begin, end, policies, left):
                        trip = part.forward + part.backward + later
                        if begin in trips and trips[begin][0] <= trip:
                            break
                        if self._fits(part, trip, left, held, slack):
                            trips[begin] = trip, (part, *behind[end][1])
                            break
        return trips[0][1] if 0 in trips else None

    def _fits(self, part: RankStage, trip: float, left: float, held: float, slack: float) -> bool:
        """Whether a rank does its work in the seconds that are `left`, and holds all microbatches for a trip in those
        in which it may hold any."""
        count, many = self.microbatches, max(part.many, 1)
        early = min(many * part.forward, trip - part.backward)  # what there is to do before the first B
        turns = -(-count // many)
        others = (count - 1 - (turns - 1) * many) * max(part.forward, part.backward)
        both = part.forward + part.backward
        done = count * both + (count - part.late) * (part.work - both)  # before the last B ends
        return (
            part.many > 0
            and trip - part.backward + count * part.work - early <= left
            and turns * trip + others <= held
            and done <= held
            and (1 + slack) * count * trip <= many * held
        )

    def _parts(self, begin: int, end: int, policies: Sequence[Policy], left: float) -> Iterator[RankStage]:
        """The stage under each policy with which its work can be done, the quickest first."""
        least = self.microbatches * (sum(self._before[end]) - sum(self._before[begin]))
        fits = least <= left and self.prices.footprint.resident(begin, end) < self.memory
        for policy in reversed(policies) if fits else ():
            key = begin, end, policy
            if key not in self._known:
                self._known[key] = self._part(*key)
            if self.microbatches * self._known[key].work > left:
                return
            yield self._known[key]

    def _part(self, begin: int, end: int, policy: Policy) -> RankStage:
        edges = [edge for edge in (begin, end) if 0 < edge < self._end]
        stage = int(begin > 0)
        policies = tuple(policy if each == stage else "off" for each in range(len(edges) + 1))
        held = self.prices.held_by_any_order(Placement("linear", len(policies), 1), edges, self.rows, policies)[stage]
        price = self.prices.stages(edges, policies, self.rows)[stage]
        each = price.kept + self._sent[end]
        room = max(0.0, self.memory - held) * ROUNDING
        many, late = (
            int(max(0, min(self.microbatches, free / size))) if size else self.microbatches
            for free, size in ((room, each), (room - each + price.residue, price.residue))
        )
        return RankStage(begin, policy, *price.seconds[:2], sum(price.seconds) - price.saved, many, late)
