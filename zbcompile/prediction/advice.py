"""The limits of a pipeline, and remedies: alternatives on the same stages, each simulated."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbcompile.schedules import Costs, Schedule, ScheduleError, Timeline, build, names, simulate
from zbcompile.schedules.ir.actions import F
from zbcompile.schedules.searching.pairs import with_pairs
from zbcompile.tables import Figure, Table

WORTH = 0.01  # minimum relative speed-up to be listed
LEANER = 0.1  # or minimum relative saving of the fullest rank's memory
SAME = 1e-3  # relative difference in memory that is none
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
        """Whether the change gains enough, in time or in memory, to be tried."""
        return self.time_ratio < 1 - WORTH or self.peak_ratio < 1 - LEANER


@dataclass(frozen=True)
class ImpossibleChange:
    """A change that is impossible, and the reason."""

    option: str
    reason: str


def advice_table(found: Sequence[Alternative], limits: str, impossible: Sequence[ImpossibleChange] = ()) -> Table:
    """What limits a step, in words, and changes to it with their predicted effects, those that gain enough first."""
    rows = [
        [
            Figure("option", each.option),
            Figure("time", each.time_ratio - 1, "change", "microbatch"),
            Figure("peak memory", each.peak_ratio - 1, "change"),
            Figure("bubble", each.bubble, "share"),
            Figure("gains", "yes" if each.worth else ""),
            Figure("what", each.change),
        ]
        for each in sorted(found, key=lambda each: not each.worth)
    ]
    notes = [limits, *(f"Not tried: {each.option}: {each.reason}" for each in impossible)]
    return Table("advice", "What limits it, and what to try (each predicted)", rows, notes)


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


Peak = Callable[[Timeline], float]


def waiting_peak(timeline: Timeline) -> float:
    """The most that waits on any rank."""
    return max(timeline.peak_memory)


def alternatives(timeline: Timeline, peak: Peak = waiting_peak) -> tuple[Alternative, ...]:
    """Twice the microbatches, and of the other schedules on the same stages those that nothing beats in both time and
    memory; whether they gain or not. `peak` says what the fullest rank holds."""
    now = peak(timeline)

    def known(then: Timeline) -> float:
        return now if then is timeline else peak(then)

    more = _more_microbatches(timeline, known)
    others = [
        judge("on the same stages", f"--schedule {name}", timeline, then, known)
        for name, then in _others(timeline.schedule, timeline.costs)
    ]
    return tuple(found for found in (more, *front(others)) if found)


def front(found: Iterable[Alternative]) -> list[Alternative]:
    """The Pareto front, the fastest first: each takes less memory than all that are as fast."""
    kept: list[Alternative] = []
    for each in sorted(found, key=lambda a: (a.time_ratio, a.peak_ratio)):
        if not kept or each.peak_ratio < kept[-1].peak_ratio * (1 - SAME):
            kept.append(each)
    return kept


def _more_microbatches(timeline: Timeline, peak: Peak) -> Alternative | None:
    schedule = timeline.schedule
    count = 2 * schedule.microbatches
    twice = _built(schedule, schedule.name, count)
    if twice is None:
        return None
    return judge("of the same size", f"--microbatches {count}", timeline, _simulated(twice, timeline.costs), peak)


def _others(schedule: Schedule, costs: Costs) -> Iterator[tuple[str, Timeline]]:
    """The step under every other name; of forward passes alone there is one order."""
    for name in names() if schedule.ops > {F} else ():
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


def judge(change: str, option: str, now: Timeline, then: Timeline, peak: Peak = waiting_peak) -> Alternative:
    """The step after a change relative to the present one."""
    after, before = (t.makespan / t.schedule.microbatches for t in (then, now))
    return Alternative(change, option, _ratio(after, before), then.bubble, _ratio(peak(then), peak(now)))


def _ratio(after: float, before: float) -> float:
    return after / before if before else 1.0


def format_idle(shares: Mapping[str, float]) -> str:
    """The causes that matter, in words."""
    parts = [f"{cause} {share:.1%}" for cause, share in shares.items() if share >= 0.0005]
    total = sum(shares.values())
    return f"Ranks are idle {total:.1%} of the time: {', '.join(parts)}." if parts else "No rank is idle."


@dataclass(frozen=True)
class WhatIf:
    """What the step would be without one cause of lost time: `gain` is the share of the time per microbatch that would
    be saved."""

    cause: str
    change: str
    gain: float


def what_if(timeline: Timeline) -> tuple[WhatIf, ...]:
    """Each cause of lost time, the largest first, by simulating the step without it."""
    costs = timeline.costs
    free = replace(costs, comm=0, bandwidth=None, links=(), cast=None, stats=None)
    twice = _built(timeline.schedule, timeline.schedule.name, 2 * timeline.schedule.microbatches)
    steps = [
        ("messages", "messages free", simulate(timeline.program, free)),
        ("balance", "all ranks with equal work", simulate(timeline.program, _with_equal_ranks(timeline))),
    ]
    if twice is not None:
        steps.append(("filling", "twice the microbatches", simulate(twice, costs)))
    found = [WhatIf(cause, change, 1 - judge("", "", timeline, then).time_ratio) for cause, change, then in steps]
    return tuple(sorted(found, key=lambda each: -each.gain))


def _with_equal_ranks(timeline: Timeline) -> Costs:
    """The costs with every rank's stages scaled so that its work is the mean."""
    placement, costs, busy = timeline.schedule.placement, timeline.costs, timeline.busy
    mean = sum(busy) / len(busy)
    scale = [
        mean / work if work else 1.0 for rank in map(placement.rank, range(costs.stages)) for work in (busy[rank],)
    ]
    names = ("forward", "backward", "weight", "saved", "vocab_s", "vocab_t")
    changed: dict[str, Any] = {n: tuple(t * s for t, s in zip(getattr(costs, n), scale, strict=True)) for n in names}
    return replace(costs, **changed)


def what_limits(timeline: Timeline) -> str:
    """A plain sentence on what keeps the step from being shorter, decided by `what_if`."""
    step, busy = timeline.makespan, timeline.busy
    mean = sum(busy) / len(busy)
    little = f"Little limits this pipeline: {_share(mean, step)} of all ranks' time is work."
    if not step or 1 - mean / step < LITTLE:
        return little
    tried = what_if(timeline)
    if tried[0].gain < LITTLE and step - max(busy) < LITTLE * step:
        return little
    if tried[0].gain < LITTLE:
        return (
            f"What limits this pipeline is its order: the busiest rank is idle {_share(step - max(busy), step)} of the "
            f"step, and free messages, equal ranks or twice the microbatches would each save less than {LITTLE:.0%}; "
            "another schedule may save more."
        )
    heaviest = max(range(len(busy)), key=busy.__getitem__)
    gains = ", ".join(f"{each.change} {each.gain:.1%}" for each in tried if each.gain >= 0.0005)
    return (
        _LIMITS[tried[0].cause].format(
            gain=f"{tried[0].gain:.1%}", m=timeline.schedule.microbatches, rank=heaviest, ratio=busy[heaviest] / mean
        )
        + f" What would be saved, each simulated alone: {gains}."
    )


_LIMITS = {
    "filling": "What limits this pipeline is filling and draining it: twice the microbatches would save {gain} of the "
    "time of each. {m} are too few to hide it; more of them, or an order that fills faster, shorten it.",
    "messages": "What limits this pipeline are its messages: without them the step would be {gain} shorter. Smaller "
    "boundaries, fewer stages, or an order with more passes in flight hide them.",
    "balance": "What limits this pipeline is its balance: rank {rank} has {ratio:.2f} times the mean work, and equal "
    "ranks would save {gain} of the step. No order recovers that; a cut that makes the ranks equal does, or an output "
    "layer that is sharded over them.",
}


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 1:.1%}"
