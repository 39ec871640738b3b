"""The limits of a pipeline, and remedies: alternatives on the same stages, each simulated."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zbcompile.schedules import Costs, Schedule, ScheduleError, Timeline, build, names, simulate
from zbcompile.schedules.searching.pairs import with_pairs

WORTH = 0.01  # minimum relative speed-up to be listed
LEANER = 0.1  # or minimum relative saving of the fullest rank's memory
LITTLE = 0.02  # share of idle time that is too small to mention


@dataclass(frozen=True)
class Alternative:
    """A change, in words and as an option of the command line, with the step that it leads to: `time_ratio` is the time
    per microbatch, `peak_ratio` the fullest rank's memory, both relative to the step at hand."""

    change: str
    option: str
    time_ratio: float
    bubble: float
    peak_ratio: float

    @property
    def worth(self) -> bool:
        """Whether it gains enough, in time or in memory, to be tried."""
        return self.time_ratio < 1 - WORTH or self.peak_ratio < 1 - LEANER


def idle_by_cause(timeline: Timeline) -> dict[str, float]:
    """The share of all ranks' time in which they stand still, by cause, largest first.

    `zbcompile.schedules.simulation.idle_causes` defines the causes.
    """
    total: dict[str, float] = defaultdict(float)
    for idle in timeline.idle:
        total[idle.cause] += idle.end - idle.start
    whole = timeline.schedule.ranks * timeline.makespan
    shares = {cause: time / whole for cause, time in total.items()} if whole else {}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def alternatives(timeline: Timeline) -> tuple[Alternative, ...]:
    """Twice the microbatches, the fastest and the leanest other schedule, all on the same stages; whether they gain or
    not."""
    more = _more_microbatches(timeline)
    others = [
        judge("on the same stages", f"--schedule {name}", timeline, then)
        for name, then in _others(timeline.schedule, timeline.costs)
    ]
    fastest = min(others, key=lambda a: (a.time_ratio, a.peak_ratio), default=None)
    leanest = min(others, key=lambda a: (a.peak_ratio, a.time_ratio), default=None)
    return tuple(dict.fromkeys(found for found in (more, fastest, leanest) if found))


def _more_microbatches(timeline: Timeline) -> Alternative | None:
    schedule = timeline.schedule
    count = 2 * schedule.microbatches
    twice = _built(schedule, schedule.name, count)
    if twice is None:
        return None
    change = "of the same size"
    return judge(change, f"--microbatches {count}", timeline, _simulated(twice, timeline.costs))


def _others(schedule: Schedule, costs: Costs) -> Iterator[tuple[str, Timeline]]:
    for name in names():
        other = _built(schedule, name, schedule.microbatches) if name != schedule.name else None
        if other is not None and other.placement == schedule.placement:
            yield name, _simulated(other, costs)


def _simulated(schedule: Schedule, costs: Costs) -> Timeline:
    return simulate(with_pairs(schedule, costs), costs)


def _built(schedule: Schedule, name: str, microbatches: int) -> Schedule | None:
    """The schedule; None if it does not admit these counts and so is not an alternative."""
    try:
        return build(name, schedule.ranks, microbatches, chunks=schedule.placement.chunks)
    except ScheduleError:
        return None


def judge(change: str, option: str, now: Timeline, then: Timeline) -> Alternative:
    """The step after a change relative to the present one."""
    after, before = (t.makespan / t.schedule.microbatches for t in (then, now))
    peaks = max(then.peak_memory), max(now.peak_memory)
    return Alternative(change, option, _ratio(after, before), then.bubble, _ratio(*peaks))


def _ratio(after: float, before: float) -> float:
    return after / before if before else 1.0


def format_idle(shares: Mapping[str, float]) -> str:
    """The causes that matter, in words."""
    parts = [f"{cause} {share:.1%}" for cause, share in shares.items() if share >= 0.0005]
    total = sum(shares.values())
    return f"Ranks are idle {total:.1%} of the time: {', '.join(parts)}." if parts else "No rank is idle."


def what_limits(timeline: Timeline) -> str:
    """A plain sentence on what keeps the step from being shorter."""
    step, busy = timeline.makespan, timeline.busy
    mean = sum(busy) / len(busy)
    if not step or 1 - mean / step < LITTLE:
        return f"Little limits this pipeline: {_share(mean, step)} of all ranks' time is work."
    heaviest = max(range(len(busy)), key=busy.__getitem__)
    unequal, waiting = busy[heaviest] - mean, step - busy[heaviest]
    if unequal >= waiting:
        return (
            f"What limits this pipeline is its balance: rank {heaviest} has {busy[heaviest] / mean:.2f} times the mean "
            f"work, and the others wait for it, {_share(unequal, step)} of the step. No order recovers that; a cut "
            "that makes the ranks equal does, or an output layer that is sharded over them."
        )
    return _PHASES[_phase(timeline)].format(share=_share(waiting, step), m=timeline.schedule.microbatches)


_PHASES = {
    "phases": "What limits this pipeline is filling and draining it: the busiest rank is idle {share} of the "
    "step. {m} microbatches are too few to hide that; more of them, or an order that fills faster, shorten it.",
    "waits": "What limits this pipeline are waits in the middle of the step: the busiest rank is idle {share} of "
    "it. The order does not fit the times of the passes; another schedule may.",
    "communication": "What limits this pipeline are messages in flight: the busiest rank is idle {share} of "
    "the step. Smaller boundaries or an order with more passes in flight hide them.",
}


def _phase(timeline: Timeline) -> str:
    """Where most of the idle time is."""
    causes = idle_by_cause(timeline)
    kinds = {
        "phases": causes.get("warm-up", 0) + causes.get("cool-down", 0),
        "waits": causes.get("wait", 0) + causes.get("imbalance", 0),
        "communication": causes.get("communication", 0),
    }
    return max(kinds, key=kinds.__getitem__)


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 1:.1%}"
