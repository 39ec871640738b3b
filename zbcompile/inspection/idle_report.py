"""The reasons for a step's length: the longest idle intervals of a rank, and the critical path."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby

from zbcompile.amounts import format_share, format_time
from zbcompile.schedules import CriticalStep, Timeline, critical_path
from zbcompile.schedules.ir.actions import flatten
from zbcompile.tables import Figure, Table


def critical_table(timeline: Timeline) -> Table:
    """Returns the chain of actions that determines the step's length, divided wherever it changes
    the rank."""
    path = critical_path(timeline)
    kinds = ", ".join(
        f"{kind} {format_share(time / (timeline.finish or 1))}"
        for kind, time in time_by_kind(path).items()
    )
    order, length = timeline.schedule, format_time(timeline.finish, "s")
    rows = [
        [
            Figure("from", steps[0].start, "s"),
            Figure("takes", steps[-1].end - steps[0].start, "s"),
            Figure("rank", steps[0].rank),
            Figure("actions", _actions(steps)),
            *([Figure("then on its way", steps[-1].travel, "s")] if steps[-1].travel else []),
        ]
        for steps in ([*run] for _, run in groupby(path, key=lambda step: step.rank))
    ]
    step = f"The step of {order.name} with {order.microbatches} microbatches"
    title = f"{step} takes {length} because of this chain of {len(path)} actions: {kinds}."
    return Table(
        "critical path", title, rows, ["Making anything else faster does not shorten the step."]
    )


def time_by_kind(path: Sequence[CriticalStep]) -> dict[str, float]:
    """Returns how much of a path each kind of step takes ("F", "F|BW", ..., "messages",
    "overhead"), longest first."""
    total = {
        "messages": sum(step.travel for step in path),
        "overhead": sum(step.overhead for step in path),
    }
    for step in path:
        kind = "|".join(action.op for action in flatten((step.step,)))
        total[kind] = total.get(kind, 0) + step.end - step.start
    return {kind: time for kind, time in sorted(total.items(), key=lambda item: -item[1]) if time}


def idle_by_cause(timeline: Timeline) -> dict[str, float]:
    """Returns the share of all ranks' time in which they are idle, by cause, largest first."""
    total: dict[str, float] = defaultdict(float)
    for idle in timeline.idle:
        total[idle.cause] += idle.end - idle.start
    total_seconds = timeline.schedule.ranks * timeline.makespan
    shares = {cause: time / total_seconds for cause, time in total.items()} if total_seconds else {}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def format_idle(shares: Mapping[str, float]) -> str:
    """Returns one sentence with the causes whose share is not negligible."""
    parts = [f"{cause} {share:.1%}" for cause, share in shares.items() if share >= 0.0005]
    total = sum(shares.values())
    return (
        f"Ranks are idle {total:.1%} of the time: {', '.join(parts)}."
        if parts
        else "No rank is idle."
    )


def _actions(legs: Sequence[CriticalStep]) -> str:
    steps = [str(critical_step.step) for critical_step in legs]
    return (
        ", ".join(steps)
        if len(steps) <= 6
        else f"{', '.join(steps[:3])} ... {', '.join(steps[-2:])}"
    )
