"""A recorded step beside its prediction: where the difference is, rank by rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from zbcompile.errors import PipelineError
from zbcompile.prediction.predict import Basis
from zbcompile.program.step_record import StepRecord, mean_seconds, recorded_timeline
from zbcompile.schedules import Costs, Schedule, Timeline, simulate, with_updates
from zbcompile.schedules.ir.actions import ONCE
from zbcompile.schedules.visualization.figure import figure
from zbcompile.schedules.visualization.units import in_units

PASSES = ("F", "B", "W", "BW", "S", "T")
WAITS = ("warm-up", "wait", "imbalance", "cool-down")
_SILENT = ("threads", "order", "graphs", "types")  # differ only along with entries that are reported anyway


@dataclass(frozen=True)
class RankDifference:
    """The measured time of a rank's step less the predicted one, in seconds; the four parts add up to the difference.

    * `compute`: its own passes;
    * `communication`: results that were made and on their way while it stood waiting for them;
    * `imbalance`: waits for passes of other ranks, while the pipeline fills, runs and drains;
    * `overhead`: all inputs had arrived: the host's work between two passes.
    """

    rank: int
    compute: float
    communication: float
    imbalance: float
    overhead: float
    predicted_peak: int
    measured_peak: int


@dataclass(frozen=True)
class PassDifference:
    """The time of one pass of a stage in seconds: as predicted, and the mean over the microbatches of the record."""

    stage: int
    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class StepComparison:
    """A record beside the prediction. Steps count from the first pass to the end of the last, in seconds.

    `replayed_step` is what the schedule would take if every pass took its mean measured time, and messages none.
    `call` is the whole call of `step`. `in_process`: the ranks took turns, and what is measured is the replayed step.
    """

    basis: str
    predicted_step: float
    predicted_bubble: float
    measured_step: float
    measured_bubble: float
    replayed_step: float
    call: float
    in_process: bool
    ranks: tuple[RankDifference, ...]
    passes: tuple[PassDifference, ...]
    notes: tuple[str, ...]
    timelines: tuple[Timeline, ...] = field(default=(), repr=False)

    def _repr_html_(self) -> str:
        """In notebooks, the predicted step above the measured one."""
        return figure(in_units(self.timelines))

    @property
    def difference(self) -> float:
        return self.measured_step - self.predicted_step


def measured_timeline(record: StepRecord, memory: Costs) -> Timeline:
    """The step as it ran; of ranks that took turns in one process, their passes replayed as if each had its own.

    What a pass holds is taken from `memory`, in its unit.
    """
    costs = replace(record.costs, activation=memory.activation, residue=memory.residue, vocab_state=memory.vocab_state)
    if record.in_process:
        return simulate(record.schedule, costs)
    return recorded_timeline(record.schedule, record.spans, costs)


def compare_step(
    record: StepRecord, predicted: Timeline, basis: Basis, manifest: Mapping[str, Any], rescale: bool = False
) -> StepComparison:
    """Compare `record` with its prediction under `basis`; `manifest` is that of the program that was predicted.
    `rescale`: of the predicted times only the ratios count, and all passes together take as long as in the record.

    Raises PipelineError if the record is of another schedule, or the prediction is not in seconds.
    """
    if basis.unit != "s":
        raise PipelineError("--measured compares seconds; --costs uniform has none. Use flops, or a file of costs.")
    updates = record.schedule.ops & ONCE  # the optimizer's actions, which the record alone has
    if updates:
        predicted = simulate(with_updates(predicted.program, updates), predicted.costs)
    require_same_schedule(record.schedule, predicted.schedule)
    text = basis.text
    if rescale:
        factor = sum(record.timeline.busy) / (sum(predicted.busy) or 1.0)
        predicted = simulate(predicted.program, _scaled(predicted.costs, factor))
        text = f"{text}; {factor:.2f} times that, so that all passes take as long as measured"
    measured = measured_timeline(record, predicted.costs)
    return StepComparison(
        basis=text,
        predicted_step=predicted.finish,
        predicted_bubble=pass_bubble(predicted),
        measured_step=measured.finish,
        measured_bubble=pass_bubble(measured),
        replayed_step=simulate(record.schedule, record.costs_of_passes).finish,
        call=record.step_time,
        in_process=record.in_process,
        ranks=tuple(_rank(rank, record, predicted, measured) for rank in range(predicted.schedule.ranks)),
        passes=tuple(_passes(record, predicted)),
        notes=tuple(_other_program(record.program, manifest)),
        timelines=(predicted, measured),
    )


def _scaled(costs: Costs, factor: float) -> Costs:
    names = ("forward", "backward", "weight", "saved", "vocab_s", "vocab_t")
    changed: dict[str, Any] = {name: tuple(factor * time for time in getattr(costs, name)) for name in names}
    return replace(costs, **changed)


def require_same_schedule(recorded: Schedule, here: Schedule) -> None:
    """Raise PipelineError unless a record has the actions that are predicted."""
    if recorded.orders == here.orders:
        return
    sizes = [f"{s.name} on {s.ranks} ranks with {s.microbatches} microbatches" for s in (recorded, here)]
    what = "the same name and sizes, but another order" if sizes[0] == sizes[1] else f"here it is {sizes[1]}"
    raise PipelineError(f"the record is of {sizes[0]}; {what}. Leave out --schedule: the record holds its own.")


def pass_bubble(timeline: Timeline) -> float:
    """The share of the time from the first pass to the last that the busiest rank is idle."""
    return 1 - max(timeline.busy) / timeline.finish if timeline.finish else 0.0


def _rank(rank: int, record: StepRecord, predicted: Timeline, measured: Timeline) -> RankDifference:
    before, after = predicted.idle_by_cause[rank], measured.idle_by_cause[rank]

    def more(*causes: str) -> float:
        idle_before, idle_after = (sum(idle.get(cause, 0.0) for cause in causes) for idle in (before, after))  # type: ignore[call-overload]
        return float(idle_after - idle_before)

    return RankDifference(
        rank=rank,
        compute=measured.busy[rank] - predicted.busy[rank],
        communication=more("communication"),
        imbalance=more(*WAITS),
        overhead=more("overhead"),
        predicted_peak=int(predicted.peak_memory[rank]),
        measured_peak=record.peak_activation_bytes[rank],
    )


def _passes(record: StepRecord, predicted: Timeline) -> Iterator[PassDifference]:
    measured = mean_seconds(record.spans)
    for stage in range(predicted.schedule.stages):
        for name in PASSES:
            if (name, stage) in measured:
                yield PassDifference(stage, name, float(predicted.costs.time(name, stage)), measured[name, stage])


def _other_program(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """What the record's program has that the predicted one has not: the figures then compare two different things."""
    differing = [key for key in here if key in recorded and recorded[key] != here[key]]
    told = [key for key in differing if key not in _SILENT]
    for key in told:
        was, now = (str(each[key]) for each in (recorded, here))
        values = f"{was} there, {now} here" if len(was) + len(now) < 60 else "not the same"
        yield f"recorded from another program: {key} {values}"
    if not told and set(differing) & {"graphs", "types"}:
        yield "recorded from another program: its graphs differ"
