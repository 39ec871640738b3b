"""How much a rank holds, from what each kind adds and frees: F adds `activation`, B leaves `residue`, W frees it."""

from collections.abc import Sequence
from itertools import accumulate
from operator import le

from zbcompile.schedules.ir.actions import F, Step, W, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.kinds import KINDS
from zbcompile.schedules.ir.schedule import Schedule


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """The most that each rank holds at any time, in the unit of `costs.activation`.

    What F adds is held from its start, what B or W frees is held until its end; a pair holds both.
    """
    return tuple(max(accumulate(deltas(order, costs)), default=0) for order in schedule.orders)


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
