"""The optimizer's actions, which a stage runs once per step, in the orders of all ranks.

REDUCE starts the sum of the stage's gradients right after its last W. OPT comes after everything
that another rank needs and, where there are sums, one place behind REDUCE, so that a sum has that
long.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from zbcompile.schedules.ir.actions import COMMUNICATION, OPT, REDUCE, Action, Step, W, flatten
from zbcompile.schedules.ir.kinds import work_of
from zbcompile.schedules.ir.schedule import Schedule


def with_updates(schedule: Schedule, kinds: Collection[str]) -> Schedule:
    """Returns the schedule with the actions of these `kinds`, REDUCE or OPT or both, for every
    stage.

    Under two model copies (`dual`) all parameters are complete at the end of the step only: no
    updates are added.

    >>> from zbcompile.schedules import build
    >>> print(with_updates(build("zb-h1", ranks=2, microbatches=1), ("REDUCE", "OPT")))
    zb-h1: 2 ranks, 1 microbatches, linear placement, 1 chunk
    rank 0  F0.0  B0.0  W0.0  REDUCE0.0  OPT0.0
    rank 1  F1.0  B1.0  W1.0  REDUCE1.0  OPT1.0
    """
    if not kinds or schedule.placement.copies > 1:
        return schedule
    orders = []
    for order in schedule.orders:
        compute = [step for step in order if step[0] not in COMMUNICATION]
        actions = [(i, action) for i, step in enumerate(compute) for action in flatten((step,))]
        last = {action.stage: index for index, action in actions if W in work_of(action.op)}
        awaited = max((index for index, action in actions if action.op != W), default=0)
        # by the number of the compute step that follows
        updates: dict[int, list[Action]] = defaultdict(list)
        for stage, index in last.items() if REDUCE in kinds else ():
            updates[index + 1].append(Action(REDUCE, stage, 0))
        for stage, index in sorted(last.items(), key=lambda item: item[1]) if OPT in kinds else ():
            update = min(max(awaited, index + (REDUCE in kinds)), len(compute) - 1)
            updates[update + 1].append(Action(OPT, stage, 0))
        steps, count = list[Step](), 0
        for step in order:
            if step[0] not in COMMUNICATION:
                steps += updates[count]
                count += 1
            steps.append(step)
        orders.append((*steps, *updates[count]))
    return replace(schedule, orders=tuple(orders))
