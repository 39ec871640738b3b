"""Who waits for whom, when orders did not run to their end."""

from zbcompile.schedules.actions import COLLECTIVES, RECV_B, RECV_F, SEND_B, SEND_F, Action, B
from zbcompile.schedules.engine import Run, parts
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.excerpt import excerpt
from zbcompile.schedules.schedule import Lowered, Schedule


def require_finished(program: Schedule | Lowered, outcome: Run) -> None:
    """Raise `ScheduleError` with the circle of waits, or the action that is missing, unless every rank has finished."""
    if not outcome.blocked:
        return
    schedule, orders = parts(program)
    lines, seen = [], []
    rank = min(outcome.blocked)
    while rank in outcome.blocked and rank not in seen:
        seen.append(rank)
        step = orders[rank][len(outcome.end[rank])]
        wanted = outcome.events.action(outcome.blocked[rank])
        owner = schedule.rank_of(wanted.stage, wanted.microbatch)
        lines.append(f"  rank {rank} stops at {step} and waits for rank {owner} to {_deed(wanted)}")
        rank = owner
    if rank in seen:
        what = "deadlock: these ranks wait for each other"
    else:
        what = f"the orders do not run to their end: rank {rank} is done and never makes what is waited for"
    grid = excerpt(orders, seen[-1], len(outcome.end[seen[-1]]))
    raise ScheduleError("\n".join([f"{schedule.name}: {what}", *lines, grid]))


def _deed(action: Action) -> str:
    if action.op in (RECV_F, RECV_B, *COLLECTIVES):
        return f"post {action}"
    if action.op in (SEND_F, SEND_B):
        return f"reach {action}"
    return f"run {action}" if action.op != B else f"run B or BW of stage {action.stage}, microbatch {action.microbatch}"
