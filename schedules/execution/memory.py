"""The memory that a rank holds: F adds `activation`, B shrinks that to `residue`, W frees
the rest."""

from collections.abc import Sequence
from itertools import accumulate

from zbcompile.schedules.ir.actions import Step, flatten
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import Schedule


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """The most that each rank holds at any time, in the unit of `costs.activation`.

    What F adds is held from its start, what B or W frees is held until its end; a pair holds both.
    """
    return tuple(max(accumulate(deltas(order, costs)), default=0) for order in schedule.orders)


def deltas(order: Sequence[Step], costs: Costs) -> list[float]:
    """Returns the change of memory with each action of one rank, pairs opened forward first."""
    actions = flatten(order)
    change = {op: costs.added(op) for op in {action[0] for action in actions}}
    return [change[op][stage] for op, stage, _ in actions]
