"""What limits a pipeline, and what would change it: alternatives on the same stages, each simulated."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zbcompile.schedules import Costs, Schedule, ScheduleError, build, names, simulate
from zbcompile.schedules.timeline import Timeline

WORTH = 0.01  # an alternative is worth a line if the step gets so much shorter
LEANER = 0.1  # or the fullest rank so much emptier


@dataclass(frozen=True)
class Alternative:
    """A change, with the step it leads to: `time_ratio` is the time per microbatch, `peak_ratio` the fullest rank's
    memory, both relative to the step at hand."""

    change: str
    time_ratio: float
    bubble: float
    peak_ratio: float


def idle_by_cause(timeline: Timeline) -> dict[str, float]:
    """The share of all ranks' time in which they stand still, by cause, largest first.

    `zbcompile.schedules.idle` defines the causes.
    """
    total: dict[str, float] = defaultdict(float)
    for idle in timeline.idle:
        total[idle.cause] += idle.end - idle.start
    whole = timeline.schedule.ranks * timeline.makespan
    shares = {cause: time / whole for cause, time in total.items()} if whole else {}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def alternatives(timeline: Timeline) -> tuple[Alternative, ...]:
    """More microbatches, the fastest and the leanest schedule on the same stages; those that gain enough."""
    more = _more_microbatches(timeline)
    others = [_judge(name, timeline, other) for name, other in _others(timeline.schedule, timeline.costs)]
    fastest = min(others, key=lambda a: (a.time_ratio, a.peak_ratio), default=None)
    leanest = min(others, key=lambda a: (a.peak_ratio, a.time_ratio), default=None)
    chosen = dict.fromkeys(a for a in (more, fastest) if a and a.time_ratio < 1 - WORTH)
    if leanest and leanest.peak_ratio < 1 - LEANER:
        chosen[leanest] = None
    return tuple(chosen)


def _more_microbatches(timeline: Timeline) -> Alternative | None:
    schedule = timeline.schedule
    twice = _built(schedule, schedule.name, 2 * schedule.microbatches)
    change = f"{2 * schedule.microbatches} microbatches of the same size"
    return _judge(change, timeline, simulate(twice, timeline.costs)) if twice else None


def _others(schedule: Schedule, costs: Costs) -> Iterator[tuple[str, Timeline]]:
    for name in names():
        other = _built(schedule, name, schedule.microbatches) if name != schedule.name else None
        if other is not None and other.placement == schedule.placement:
            yield name, simulate(other, costs)


def _built(schedule: Schedule, name: str, microbatches: int) -> Schedule | None:
    """None where the schedule does not admit these counts: then it is no alternative."""
    try:
        return build(name, schedule.ranks, microbatches, chunks=schedule.placement.chunks)
    except ScheduleError:
        return None


def _judge(change: str, now: Timeline, then: Timeline) -> Alternative:
    per_microbatch = then.makespan / then.schedule.microbatches, now.makespan / now.schedule.microbatches
    return Alternative(
        change, _ratio(*per_microbatch), then.bubble, _ratio(max(then.peak_memory), max(now.peak_memory))
    )


def _ratio(after: float, before: float) -> float:
    return after / before if before else 1.0


def format_idle(shares: Mapping[str, float]) -> str:
    """The causes that matter, in words."""
    parts = [f"{cause} {share:.1%}" for cause, share in shares.items() if share >= 0.0005]
    total = sum(shares.values())
    return f"Ranks stand still {total:.1%} of the time: {', '.join(parts)}." if parts else "No rank stands still."
