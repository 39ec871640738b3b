"""Actions that run once per step, not once per microbatch: the optimizer's in the orders of all ranks, and the
exchanges around their programs.

VALIDATE and GATHER wait for the previous training step, before the first forward of their stage.
REDUCE starts the sum of the stage's gradients right after its last W. OPT comes after everything that another
rank waits for and, where there are sums, one place behind REDUCE, so that a sum has that long.

An exchange (`zbcompile.schedules.ir.actions.EXCHANGES`) comes before everything else on every rank if the table has it
before F, otherwise behind everything, in the order of the table. So two ranks can never wait for each other in
different exchanges.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.execution.deadlock import schedule_error_at
from zbcompile.schedules.ir.actions import (
    COMMUNICATION,
    EXCHANGES,
    GATHER,
    OPT,
    REDUCE,
    VALIDATE,
    Action,
    F,
    Step,
    W,
    flatten,
)
from zbcompile.schedules.ir.kinds import FIRST_EXCHANGES, work_of
from zbcompile.schedules.ir.schedule import Schedule

UPDATES = (VALIDATE, GATHER, REDUCE, OPT)


def with_updates(schedule: Schedule, kinds: Collection[str]) -> Schedule:
    """Returns the schedule with the actions of these `kinds`: of VALIDATE, GATHER, REDUCE and OPT for every stage, of
    the EXCHANGES for every rank.

    Under two model copies (`dual`) all parameters are complete at the end of the step only: no updates are added.
    Raises ScheduleError for other kinds.

    >>> from zbcompile.schedules import build
    >>> print(with_updates(build("zb-h1", ranks=2, microbatches=1), ("GATHER", "REDUCE", "OPT")))
    zb-h1: 2 ranks, 1 microbatches, linear placement, 1 chunk
    rank 0  GATHER0.0  F0.0  B0.0  W0.0  REDUCE0.0  OPT0.0
    rank 1  GATHER1.0  F1.0  B1.0  W1.0  REDUCE1.0  OPT1.0
    """
    known = (*UPDATES, *EXCHANGES)
    if isinstance(kinds, str) or not set(kinds) <= set(known):
        raise ScheduleError(f"updates {kinds!r}; expected a tuple with some of {', '.join(known)}")
    orders = schedule.compute_only().orders
    if set(kinds).intersection(UPDATES) and schedule.placement.kind != "dual":
        orders = tuple(_updated(order, kinds) for order in orders)
    orders = tuple(map(_with_communication, orders, schedule.orders))
    return replace(schedule, orders=tuple(_surrounded(rank, order, kinds) for rank, order in enumerate(orders)))


def _updated(order: Sequence[Step], kinds: Collection[str]) -> tuple[Step, ...]:
    actions = [(index, action) for index, step in enumerate(order) for action in flatten((step,))]
    first = {a.stage: index for index, a in reversed(actions) if a.op == F}
    last = {a.stage: index for index, a in actions if W in work_of(a.op)}
    awaited = max((index for index, a in actions if a.op != W), default=0)
    behind = int(REDUCE in kinds)
    updates = {stage: min(max(awaited, index + behind), len(order) - 1) for stage, index in last.items()}
    found: list[Step] = []
    for index, step in enumerate(order):
        found += _at(first, index, [VALIDATE] * (VALIDATE in kinds))
        found += _at(first, index, [GATHER] * (GATHER in kinds))
        found.append(step)
        found += _at(last, index, [REDUCE] * (REDUCE in kinds))
        found += _at(dict(sorted(updates.items(), key=lambda at: last[at[0]])), index, [OPT] * (OPT in kinds))
    return tuple(found)


def _at(places: dict[int, int], index: int, kinds: Sequence[str]) -> Iterator[Action]:
    return (Action(kind, stage, 0) for stage, place in places.items() if place == index for kind in kinds)


def _with_communication(order: Sequence[Step], program: Sequence[Step]) -> tuple[Step, ...]:
    """The steps of `order`, in which those of `program` appear, with the messages and collectives of `program`."""
    rest = iter(order)
    found: list[Step] = []
    for step in program:
        if step[0] not in COMMUNICATION:
            found += takewhile(step.__ne__, rest)
        found.append(step)
    return (*found, *rest)


def _surrounded(rank: int, program: Sequence[Step], kinds: Collection[str]) -> tuple[Step, ...]:
    """The program of a rank between its exchanges."""
    own = [Action(op, rank, 0) for op in EXCHANGES if op in kinds]
    front = [action for action in own if action.op in FIRST_EXCHANGES]
    return (*front, *program, *own[len(front) :])


def check_exchanges(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless all ranks run the same exchanges, each once, in one order around all other steps."""
    kinds = {step[0] for step in schedule.orders[0] if step[0] in EXCHANGES}
    for rank, program in enumerate(schedule.orders):
        expected = _surrounded(rank, [step for step in program if step[0] not in EXCHANGES], kinds)
        place = next((i for i, each in enumerate(zip(program, expected, strict=False)) if each[0] != each[1]), None)
        if place is not None or len(program) != len(expected):
            place = min(len(program), len(expected)) - 1 if place is None else place
            what = f"{schedule.name}: rank {rank}: {program[place]} is not in its place, or an exchange is missing"
            rule = "all ranks run the same exchanges, in the order of the table, around all other actions"
            raise schedule_error_at(f"{what}; {rule}", schedule.orders, rank, place)
