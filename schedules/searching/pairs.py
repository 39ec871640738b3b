"""Pairs of a pass that exchanges tensors in the middle of a microbatch and a W whose products hide that exchange.

A pass with collectives (tensor parallelism) waits for them. A W needs no other rank: run as one graph with the pass, it
fills the gaps between issue and wait. `with_pairs` moves Ws next to such passes: forward in the order to the pass that
precedes them, or backward to a later one; a B next to its own W becomes BW. A move is made only if neither the
simulated step nor any rank's memory suffers; the weight gradients of a stage keep their order, and so their bits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from zbcompile.schedules.execution.memory import peak_memory
from zbcompile.schedules.ir.actions import BW, Action, B, F, Pair, Step, W, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.kinds import result_of, work_of
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.schedules.simulation.timeline import Timeline, simulate

WORK = 100_000  # the most actions to simulate while looking for pairs
EQUAL = 1 + 1e-9  # sums of floats differ in their last bits with the order of the additions

Order = Sequence[Step]
Partners = Mapping[Action, Action]  # the W paired with each pass that has one


def with_pairs(schedule: Schedule, costs: Costs) -> Schedule:
    """`schedule` with Ws moved next to passes whose exchanges (`costs.forward_exchange`, `costs.backward_exchange`)
    they hide; unchanged if no pass exchanges. Its own pairs stay, but for those that are a BW.

    >>> from zbcompile.schedules import Costs, build
    >>> costs = Costs((2,) * 2, (2,) * 2, (2,) * 2, backward_exchange=(1,) * 2)
    >>> print(with_pairs(build("zb-h1", ranks=2, microbatches=3), costs))
    zb-h1: 2 ranks, 3 microbatches, linear placement, 1 chunk
    rank 0  F0.0  F0.1  BW0.0  F0.2         BW0.1  BW0.2
    rank 1  F1.0  B1.0  F1.1   (B1.1|W1.0)  F1.2   (B1.2|W1.1)  W1.2
    """
    schedule = replace(schedule, orders=tuple(tuple(map(_fused, order)) for order in schedule.orders))
    if not any((*costs.forward_exchange, *costs.backward_exchange)) or W not in schedule.ops:
        return schedule
    ways = (((1, B), (-1, B), (1, F), (-1, F)), ((-1, B), (1, B), (-1, F), (1, F)))  # see `_nearest`
    found = [_improved(schedule, costs, way) for way in ways]
    return min(found, key=lambda each: (each.timeline.makespan, each.exposed)).schedule


def exposed(schedule: Schedule, costs: Costs) -> float:
    """How long all ranks together wait for exchanges inside of their passes."""
    return sum(map(costs.waits, chain.from_iterable(schedule.orders)))


@dataclass
class _PairSearch:
    """The pairs found so far, by rank, and how the step with them compares with the one without."""

    base: Schedule
    costs: Costs
    before: Timeline
    left: int  # simulations
    schedule: Schedule
    timeline: Timeline
    partners: list[dict[Action, Action]] = field(default_factory=list)

    @property
    def exposed(self) -> float:
        return exposed(self.schedule, self.costs)

    def take(self, moves: Sequence[tuple[int, Action, Action]]) -> None:
        """Make as many of the moves as do no harm: all of them, or else those of each half."""
        if not moves or not self.left or self._try(moves) or len(moves) == 1:
            return
        middle = len(moves) // 2
        self.take(moves[:middle])
        self.take(moves[middle:])

    def _try(self, moves: Sequence[tuple[int, Action, Action]]) -> bool:
        partners = [dict(each) for each in self.partners]
        for rank, action, weight in moves:
            partners[rank][action] = weight
        orders = [_arranged(order, each) for order, each in zip(self.base.orders, partners, strict=True)]
        if not all(map(_is_in_order, self.base.orders, orders)):
            return False
        schedule = replace(self.base, orders=tuple(orders))
        if any(map(_exceeds, peak_memory(schedule, self.costs), self.before.peak_memory)):
            return False
        self.left -= 1
        timeline = simulate(schedule, self.costs)
        if _exceeds(timeline.makespan, self.timeline.makespan) or _exceeds(timeline.cost, self.before.cost):
            return False
        self.schedule, self.timeline, self.partners = schedule, timeline, partners
        return True


def _exceeds(amount: float, limit: float) -> bool:
    return amount > limit * EQUAL


def _improved(base: Schedule, costs: Costs, way: Sequence[tuple[int, str]]) -> _PairSearch:
    before = simulate(base, costs)
    room = max(8, WORK // sum(map(len, base.orders)))
    search = _PairSearch(base, costs, before, room, base, before, [{} for _ in base.orders])
    for direction, op in way:
        if any(costs.exchange(op, stage) for stage in range(base.stages)):
            ways = (_nearest(o[::direction], own, op) for o, own in zip(base.orders, search.partners, strict=True))
            search.take([(rank, *move) for rank, moves in enumerate(ways) for move in moves])
    return search


def _fused(step: Step) -> Step:
    """A B paired with its own W is BW."""
    return Action(BW, *step.first[1:]) if isinstance(step, Pair) and step == _own(step.first) else step


def _own(action: Action) -> Pair:
    return Pair(action._replace(op=B), action._replace(op=W))


def _nearest(order: Order, partners: Partners, op: str) -> Iterator[tuple[Action, Action]]:
    """Each W with the last `op` pass in front of it that has no W yet; in a reversed order, the first behind it."""
    taken, free = set(partners.values()), list[Action]()
    for step in order:
        if isinstance(step, Action) and step.op == op and step not in partners:
            free.append(step)
        elif isinstance(step, Action) and step.op == W and step not in taken and free:
            yield free.pop(), step


def _arranged(order: Order, partners: Partners) -> tuple[Step, ...]:
    """The order with each W that is a partner next to its pass."""
    taken = set(partners.values())
    return tuple(
        _fused(Pair(step, partners[step])) if isinstance(step, Action) and step in partners else step
        for step in order
        if step not in taken
    )


def _is_in_order(before: Order, after: Order) -> bool:
    """Whether every W follows its B, and the Ws of each stage each other as before."""
    done: set[tuple[int, int]] = set()
    for action in flatten(after):
        if action.op == W and action[1:] not in done:
            return False
        done |= {action[1:]} if result_of(action.op) == B else set()
    return _weights(before) == _weights(after)


def _weights(order: Order) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for action in flatten(order):
        if W in work_of(action.op):
            found.setdefault(action.stage, []).append(action.microbatch)
    return found
