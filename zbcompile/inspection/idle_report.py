"""The reasons for a step's length, in words: the longest idle intervals of a rank, and the critical path."""

import textwrap
from collections import Counter
from collections.abc import Sequence

from tabulate import tabulate

from zbcompile.amounts import format_share, format_time
from zbcompile.errors import PipelineError
from zbcompile.inspection.report import WIDTH
from zbcompile.passes.stage.stage_program import collectives_of
from zbcompile.program.program import Program
from zbcompile.schedules import Idle, Leg, Schedule, Timeline, chain, critical_path
from zbcompile.schedules.ir.actions import Action, Pair, flatten
from zbcompile.schedules.searching.pairs import waits
from zbcompile.schedules.simulation.critical_path import by_rank, time_by_kind
from zbcompile.schedules.simulation.message_slack import slack_rows

LONGEST = 5


def format_idle_intervals(timeline: Timeline, rank: int, unit: str) -> str:
    """The longest idle intervals of `rank`, each with the chain of actions on other ranks that it waited for.

    `unit` is that of the timeline ("s" or "passes"). Raises PipelineError if the rank does not exist.
    """
    require_rank(timeline.schedule, rank)
    gaps = sorted((gap for gap in timeline.idle if gap.rank == rank), key=lambda gap: gap.start - gap.end)
    total = sum(gap.end - gap.start for gap in gaps)
    share = format_share(total / timeline.finish if timeline.finish else 0)
    head = f"Rank {rank} is idle for {format_time(total, unit)} of {format_time(timeline.finish, unit)} ({share})"
    if not gaps:
        return f"{head}.\n"
    shown = gaps[:LONGEST]
    times = f"{len(gaps)} time{'s' * (len(gaps) > 1)}"
    title = f"{head}, {times}. The longest {len(shown)}, each with what the rank waited for:"
    return "\n\n".join([textwrap.fill(title, WIDTH), *(_interval(timeline, gap, unit) for gap in shown)]) + "\n"


def format_exchanges(program: Program, timeline: Timeline, rank: int, unit: str) -> str:
    """What `rank` waits for inside of its passes: the exchanges that nothing hides; empty if there are none."""
    costs, steps = timeline.costs, [tuple(flatten((step,))) for step in timeline.schedule.orders[rank]]
    counts = Counter(tuple(action[:2] for action in actions) for actions in steps)
    rows = []
    for passes, count in counts.items():
        inside = [(op, each) for op, stage in passes for each in collectives_of(program.stages[stage])]
        found = Counter((each.kind, each.dimension) for op, each in inside if each.name == op)
        times = {"F": costs.forward_exchange, "B": costs.backward_exchange, "BW": costs.backward_exchange}
        whole = sum(times[op][stage] for op, stage in passes if op in times)
        if found and whole:
            halves = [Action(*each, 0) for each in passes]
            exposed = waits(Pair(*halves) if len(halves) == 2 else halves[0], costs)
            names = ", ".join(f"{n} {kind} along {dimension}" for (kind, dimension), n in found.items())
            label = "|".join(f"{op}{stage}" for op, stage in passes)
            rows.append((label, count, format_time(count * whole, unit), format_time(count * exposed, unit), names))
    heads = ("passes", "times", "exchanges", "waited for", "of one")
    title = f"Inside of its passes rank {rank} waits for exchanges that nothing hides:"
    return f"\n{title}\n\n{tabulate(rows, heads, disable_numparse=True)}\n" if rows else ""


def require_rank(schedule: Schedule, rank: int) -> None:
    """Raise PipelineError if the rank does not exist."""
    if not 0 <= rank < schedule.ranks:
        raise PipelineError(f"rank {rank} does not exist: {schedule.name} has ranks 0 to {schedule.ranks - 1}.")


def _interval(timeline: Timeline, gap: Idle, unit: str) -> str:
    length, start = format_time(gap.end - gap.start, unit), format_time(gap.start, unit)
    if gap.step is None:
        return f"{length} of {gap.cause} from {start} on: nothing left to do until the last rank has finished"
    if gap.action is None:
        reason = "its inputs were ready" if gap.cause == "overhead" else "it waits for the update of the step before"
        return f"{length} of {gap.cause} from {start} on, before {gap.step}: {reason}"
    awaited = f"{gap.action} of rank {gap.source}"
    head = f"{length} of {gap.cause} from {start} on, before {gap.step}, which needs {awaited}"
    return "\n".join([head, *(f"  {_leg(legs, unit)}" for legs in by_rank(chain(timeline, gap)))])


def _leg(legs: Sequence[Leg], unit: str) -> str:
    steps = [str(leg.step) for leg in legs]
    what = ", ".join(steps) if len(steps) <= 6 else f"{', '.join(steps[:3])} ... {', '.join(steps[-2:])}"
    lasted = format_time(legs[-1].end - legs[0].start, unit)
    travel = f", then {format_time(legs[-1].travel, unit)} on its way" if legs[-1].travel else ""
    return f"rank {legs[0].rank}: {what}  ({len(steps)} in {lasted}{travel})"


def format_critical_path(timeline: Timeline, unit: str) -> str:
    """The chain of actions that determines the step's length, divided wherever it changes the rank."""
    path = critical_path(timeline)
    finish = timeline.finish or 1
    kinds = ", ".join(f"{kind} {format_share(time / finish)}" for kind, time in time_by_kind(path).items())
    title = (
        f"The step takes {format_time(timeline.finish, unit)} because of this chain of {len(path)} actions: {kinds}."
    )
    rows = [(format_time(legs[0].start, unit) if legs[0].start else "0", *_row(legs, unit)) for legs in by_rank(path)]
    table = tabulate(
        rows, ("from", "takes", "rank", "actions"), disable_numparse=True, colalign=("right",) * 3 + ("left",)
    )
    return f"{textwrap.fill(title, WIDTH)}\n\n{table}\n\nMaking anything else faster does not shorten the step.\n"


def format_slack(timeline: Timeline, unit: str) -> str:
    """Per link, how late its messages may be without a longer step; empty if no rank sends any."""
    rows = [
        (link, count, format_time(least, unit), format_time(middle, unit), none)
        for link, count, least, middle, none in slack_rows(timeline)
    ]
    heads = ("ranks", "messages", "least slack", "median slack", "without slack")
    title = "A message without slack that is late lengthens the step. On each link:"
    return f"\n{title}\n\n{tabulate(rows, heads, disable_numparse=True)}\n" if rows else ""


def _row(legs: Sequence[Leg], unit: str) -> tuple[str, str, str]:
    text = _leg(legs, unit).partition(": ")[2].partition("  (")[0]
    travel = f"; {format_time(legs[-1].travel, unit)} on its way" if legs[-1].travel else ""
    return format_time(legs[-1].end - legs[0].start, unit), str(legs[0].rank), text + travel
