"""A recorded step in the simulator's terms: what each pass cost, and the timeline that was run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any, NamedTuple

from zbcompile.errors import PipelineError
from zbcompile.schedules import Action, Costs, Schedule, Timeline, parse_step, peak_memory
from zbcompile.schedules.execution.event_loop import Events, Outcome
from zbcompile.schedules.ir.actions import COMPUTE, Step, flatten


class Span(NamedTuple):
    """One action with its start and end in seconds since the step began."""

    action: str
    start: float
    end: float


Spans = Mapping[int, Sequence[Span]]


def mean_seconds(spans: Spans, middle: Callable[[Iterable[float]], float] = mean) -> dict[tuple[str, int], float]:
    """The mean (or another `middle`) time of each operation on each stage over its microbatches, without messages."""
    found: dict[tuple[str, int], list[float]] = {}
    for action, start, end in (span for rank in spans.values() for span in rank):
        step = parse_step(action)
        if isinstance(step, Action) and step.op in COMPUTE:
            found.setdefault((step.op, step.stage), []).append(end - start)
    return {key: middle(times) for key, times in found.items()}


def recorded_costs(schedule: Schedule, spans: Spans) -> Costs:
    """The mean seconds of every pass of every stage, of OPT with the wait for its sum; of a stage that runs BW alone,
    all of it as `backward`.

    `comm` is the median delay between the end of a pass on one rank and the beginning of the pass on another that stood
    waiting for it. Memory is left at its default.
    """
    costs = _costs(schedule, mean_seconds(spans))
    idle = recorded_timeline(schedule, spans, costs).idle
    delays = [gap.end - gap.start for gap in idle if gap.cause == "communication"]
    return replace(costs, comm=median(delays or [0.0]))


def _costs(schedule: Schedule, means: Mapping[tuple[str, int], float]) -> Costs:
    def times(*ops: str) -> tuple[float, ...]:
        return tuple(next((means[op, s] for op in ops if (op, s) in means), 0.0) for s in range(schedule.stages))

    shards: dict[str, Any] = {"vocab_s": times("S"), "vocab_t": times("T")} if schedule.shards else {}
    return Costs(times("F"), times("B", "BW"), times("W"), optimizer=times("OPT"), **shards)


def recorded_timeline(schedule: Schedule, spans: Spans, costs: Costs) -> Timeline:
    """The step as it ran: times count from the beginning of its first pass. `costs` say what it holds, and how long
    messages travel (`recorded_costs`). Raises PipelineError if spans of the schedule are missing."""
    times = [[_time_of(step, rank, by_name) for step in schedule.orders[rank]] for rank, by_name in _named(spans)]
    if len(times) != schedule.ranks:
        raise PipelineError(f"the record has {len(times)} ranks, its schedule {schedule.name} {schedule.ranks}.")
    zero = min((start for rank in times for start, _ in rank), default=0.0)
    begin, end = ([[pair[at] - zero for pair in rank] for rank in times] for at in (0, 1))
    events = Events(schedule.stages, schedule.microbatches, ())
    return Timeline(schedule, costs, Outcome(begin, end, [], {}, events), peak_memory(schedule, costs))


def _named(spans: Spans) -> list[tuple[int, dict[str, Span]]]:
    return [(rank, {span.action: span for span in spans[rank]}) for rank in sorted(spans)]


def _time_of(step: Step, rank: int, by_name: Mapping[str, Span]) -> tuple[float, float]:
    """Of a pair: from the beginning of its forward to the end of its backward."""
    actions = flatten((step,))
    missing = next((action for action in actions if str(action) not in by_name), None)
    if missing is not None:
        raise PipelineError(f"the record has no {missing} of rank {rank}; it is damaged, or from another schedule.")
    return by_name[str(actions[0])].start, by_name[str(actions[-1])].end
