"""The memory that a rank holds: F adds `activation`, B shrinks that to `residue`, W frees the rest."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import add, le

from zbcompile.schedules.ir.actions import BW, B, F, Step, W, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.kinds import KINDS
from zbcompile.schedules.ir.placement import Placement
from zbcompile.schedules.ir.schedule import Schedule

Running = Mapping[str, Sequence[float]]


def peak_memory(schedule: Schedule, costs: Costs, running: Running | None = None) -> tuple[float, ...]:
    """The most that each rank holds at any time, in the unit of `costs.activation`.

    What F adds is held from its start, what B or W frees is held until its end; a pair holds both. `running`: by F and
    B, for each stage, the most that is alive of a microbatch while such a pass runs.
    """
    if running is None:
        return tuple(max(accumulate(deltas(order, costs)), default=0) for order in schedule.orders)
    extra = only_while_running(costs, running)
    return tuple(max(_while_running(order, costs, extra), default=0) for order in schedule.orders)


def _while_running(order: Sequence[Step], costs: Costs, extra: Running) -> Iterator[float]:
    levels = pairwise(accumulate(deltas(order, costs), initial=0))
    for held, (op, stage, _) in zip(levels, flatten(tuple(order)), strict=True):
        yield max(held) + (extra[op][stage] if op in extra else 0)


def only_while_running(costs: Costs, running: Running) -> dict[str, tuple[float, ...]]:
    """The bytes that F, B and BW of each stage hold only while they run."""
    kept, most = costs.activation, tuple(map(max, costs.activation, costs.residue))
    counted = {F: (F, kept), B: (B, most), BW: (B, kept)}
    return {op: tuple(max(0, a - b) for a, b in zip(running[of], c, strict=True)) for op, (of, c) in counted.items()}


def most_beside(placement: Placement, costs: Costs, running: Running) -> tuple[float, ...]:
    """The largest of these on each rank, if backwards are split."""
    found = only_while_running(costs, running)
    stages = map(placement.stages_of, range(placement.ranks))
    return tuple(max(found[op][stage] for op in (F, B) for stage in each) for each in stages)


def with_messages(costs: Costs, placement: Placement) -> Costs:
    """Costs under which a microbatch also holds the message that it sends, until its B: while the pipeline fills, a
    rank does not learn any earlier that the message has arrived."""
    apart = [placement.rank(s) != placement.rank(s + 1) for s in range(costs.stages - 1)]
    sent = (size * leaves for size, leaves in zip(costs.message, [*apart, False], strict=True))
    return replace(costs, activation=tuple(map(add, costs.activation, sent)))


def deltas(order: Sequence[Step], costs: Costs) -> list[float]:
    """The change of memory with each action of one rank, pairs opened forward first."""
    actions = flatten(order)
    change = {op: costs.added(op) for op in {action[0] for action in actions}}
    return [change[op][stage] for op, stage, _ in actions]


def first_beyond(order: Sequence[Step], costs: Costs, limit: float) -> int:
    """Index of the first step of one rank after which it holds more than `limit`."""
    sizes = [len(flatten((step,))) for step in order]
    owner = [index for index, size in enumerate(sizes) for _ in range(size)]
    held = accumulate(deltas(order, costs))
    return next(index for index, amount in zip(owner, held, strict=True) if amount > limit)


def most_waiting(schedule: Schedule, rank: int) -> tuple[dict[int, int], ...]:
    """How many microbatches of each of its stages wait on `rank` between F and W, at its peaks: the moments
    at which no other moment has as many or more of every stage.

    >>> from zbcompile.schedules import build
    >>> most_waiting(build("1f1b", ranks=3, microbatches=4), rank=0)
    ({0: 3},)
    """
    held = dict.fromkeys(schedule.placement.stages_of(rank), 0)
    moments = {tuple(held.values())}
    for op, stage, _ in flatten(schedule.orders[rank]):
        held[stage] += (op == F) - (W in KINDS[op].does)
        moments.add(tuple(held.values()))
    fullest = [m for m in moments if not any(o != m and all(map(le, m, o)) for o in moments)]
    return tuple(dict(zip(held, moment, strict=True)) for moment in sorted(fullest))
