"""Predicted and measured step time and bubble of every rank."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from zbcompile.program.step_record import StepRecord
from zbcompile.schedules import Costs, Schedule, format_timeline, simulate
from zbcompile.tables import Figure, grid

COMPUTE = ("F", "B", "W", "BW")


@dataclass(frozen=True)
class Times:
    """Seconds of a step, and for each rank the share of it without computation."""

    step: float
    bubble: tuple[float, ...]


def measured_costs(records: Iterable[StepRecord], stages: int) -> Costs:
    """Seconds of each stage's passes: the median over microbatches and steps. Messages are free."""
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for record in records:
        for spans in record.spans.values():
            for span in spans:
                op, stage = _pass_of(span.action)
                seconds[op, stage].append(span.end - span.start)
    typical = {key: median(values) for key, values in seconds.items()}

    def of(op: str) -> tuple[float, ...]:
        return tuple(typical.get((op, stage), 0.0) for stage in range(stages))

    step_times = tuple(0.0 if ("B", stage) in typical else bw for stage, bw in enumerate(of("BW")))
    return Costs(
        forward=of("F"),
        backward=tuple(map(sum, zip(of("B"), step_times, strict=True))),
        weight=of("W"),
    )


def simulated(schedule: Schedule, costs: Costs) -> Times:
    """The step as the simulator sees it: every rank has its own processor."""
    timeline = simulate(schedule, costs)
    return Times(timeline.makespan, tuple(1 - busy / timeline.makespan for busy in timeline.busy))


def observed(records: Sequence[StepRecord], ranks: int) -> Times:
    """Returns the measured times of all ranks: the median step, and the share of it without computation."""
    step = median(record.step_time for record in records)
    busy = [median(_busy(record, rank) for record in records) for rank in range(ranks)]
    return Times(step, tuple(1 - seconds / step for seconds in busy))


def report(schedule: Schedule, early: Sequence[StepRecord], late: Sequence[StepRecord]) -> str:
    """The table, with lines that say where its numbers come from: predicted from early steps,
    measured in late ones."""
    predicted = simulated(schedule, measured_costs(early, schedule.stages))
    if late[0].in_process:
        measured = simulated(schedule, measured_costs(late, schedule.stages))
        step_times = _milliseconds(median(record.step_time for record in late))
        source = (
            f"one process ran all ranks in turn ({step_times} a step); its action times, replayed"
            " through the simulator"
        )
    else:
        measured = observed(late, schedule.ranks)
        source = "each rank's own clock"
    rows = [
        [
            Figure("rank", rank),
            Figure("step predicted", predicted.step, "s", "step"),
            Figure("step measured", measured.step, "s", "step"),
            Figure("bubble predicted", predicted.bubble[rank], "share"),
            Figure("bubble measured", measured.bubble[rank], "share"),
            Figure("peak waiting", max(record.peak_activation_bytes[rank] for record in late), "B"),
        ]
        for rank in range(schedule.ranks)
    ]
    title = (
        f"{schedule.name}: ranks {schedule.ranks}, stages {schedule.stages}, microbatches"
        f" {schedule.microbatches}"
    )
    picture = format_timeline(
        simulate(schedule, in_milliseconds(measured_costs(late, schedule.stages))), width=110
    )
    legend = f"predicted: the simulator, with the action times of early steps\nmeasured: {source}"
    return (
        f"{title}\n{grid(rows)}\n{legend}\n\nthe last steps' action times on the schedule, in"
        f" ms:\n{picture}"
    )


def in_milliseconds(costs: Costs) -> Costs:
    """The same costs, with times in milliseconds."""

    def scaled(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(1e3 * time for time in times)

    return Costs(
        forward=scaled(costs.forward), backward=scaled(costs.backward), weight=scaled(costs.weight)
    )


def _pass_of(action: str) -> tuple[str, int]:
    """`("BW", 2)` of `"BW2.5"`; the stage is -1 for a message."""
    op = action.rstrip("0123456789.")
    return (op, int(action[len(op) :].partition(".")[0])) if op in COMPUTE else (op, -1)


def _busy(record: StepRecord, rank: int) -> float:
    return sum(
        span.end - span.start for span in record.spans[rank] if _pass_of(span.action)[0] in COMPUTE
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
