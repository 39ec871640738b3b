"""The record of a step, in the simulator's terms too, and its file: JSON with every span of every
rank."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from zbcompile.amounts import format_share, format_time
from zbcompile.errors import PipelineError
from zbcompile.json_text import Converters, from_plain, to_plain, to_text
from zbcompile.safe_files import damage_in
from zbcompile.schedules import (
    Action,
    Costs,
    Schedule,
    Timeline,
    parse_step,
    peak_memory,
    simulate,
    to_json,
)
from zbcompile.schedules.execution.order_graph import OrderGraph
from zbcompile.schedules.ir.actions import COMPUTE, Step, flatten
from zbcompile.schedules.ir.files import from_dict
from zbcompile.schedules.visualization.chrome_trace import to_chrome_trace
from zbcompile.schedules.visualization.step_tables import idle_share, rank_table
from zbcompile.schedules.visualization.svg import to_svg
from zbcompile.tables import Figure, grid
from zbcompile.untrusted_text import parse_json, read_text


class RecordedSpan(NamedTuple):
    """One action with its start and end in seconds since the step began."""

    action: str
    start: float
    end: float


Spans = Mapping[int, Sequence[RecordedSpan]]


def mean_seconds(spans: Spans) -> dict[tuple[str, int], float]:
    """The mean time of each operation on each stage over its microbatches, without messages."""
    durations: dict[tuple[str, int], list[float]] = {}
    for action, start, end in (span for rank in spans.values() for span in rank):
        step = parse_step(action)
        if isinstance(step, Action) and step.op in COMPUTE:
            durations.setdefault((step.op, step.stage), []).append(end - start)
    return {key: mean(times) for key, times in durations.items()}


def recorded_costs(schedule: Schedule, spans: Spans) -> Costs:
    """The mean seconds of every pass of every stage, of OPT with the wait for its sum; of a stage
    that runs BW alone, all of it as `backward`.

    `comm` is the median delay between the end of a pass on one rank and the beginning of the pass
    on another that stood waiting for it. Memory is left at its default.
    """
    costs = _costs(schedule, mean_seconds(spans))
    idle = recorded_timeline(schedule, spans, costs).idle
    delays = [gap.end - gap.start for gap in idle if gap.cause == "communication"]
    return replace(costs, comm=median(delays or [0.0]))


def _costs(schedule: Schedule, means: Mapping[tuple[str, int], float]) -> Costs:
    def times(*ops: str) -> tuple[float, ...]:
        return tuple(
            next((means[op, s] for op in ops if (op, s) in means), 0.0)
            for s in range(schedule.stages)
        )

    shards: dict[str, Any] = (
        {"vocab_s": times("S"), "vocab_t": times("T")} if schedule.shards else {}
    )
    return Costs(
        times("F"), times("B", "BW"), times("W"), optimizer=times("OPT"), time_unit="s", **shards
    )


def recorded_timeline(schedule: Schedule, spans: Spans, costs: Costs) -> Timeline:
    """Returns the step as it ran. Times count from the beginning of its first pass. `costs` are its
    bytes and the durations of its messages (`recorded_costs`). Raises PipelineError if spans of the
    schedule are missing.
    """
    named = {rank: {span.action: span for span in spans[rank]} for rank in sorted(spans)}
    times = [
        [_time_of(step, rank, by_name) for step in schedule.orders[rank]]
        for rank, by_name in named.items()
    ]
    if len(times) != schedule.ranks:
        raise PipelineError(
            f"the record has {len(times)} ranks, its schedule {schedule.name} {schedule.ranks}."
        )
    zero = min((start for rank in times for start, _ in rank), default=0.0)
    graph = OrderGraph(schedule)
    start, end = ([pair[at] - zero for rank in times for pair in rank] for at in (0, 1))
    for inputs in graph.inputs[len(end) :]:  # a barrier ends with the last shard
        latest = max(end[producer] for producer, _ in inputs)
        start.append(latest)
        end.append(latest)
    return Timeline(graph, costs, start, end, peak_memory(schedule, costs))


def _time_of(step: Step, rank: int, by_name: Mapping[str, RecordedSpan]) -> tuple[float, float]:
    """Begin and end of a step; of a pair, from the begin of its forward to the end of its
    backward."""
    actions = flatten((step,))
    missing = next((action for action in actions if str(action) not in by_name), None)
    if missing is not None:
        raise PipelineError(
            f"the record has no {missing} of rank {rank}; it is damaged, or from another schedule."
        )
    return by_name[str(actions[0])].start, by_name[str(actions[-1])].end


FORMAT, VERSION = "zbcompile step", 2


@dataclass(frozen=True)
class StepRecord:
    """The value of `pipe.last_step` after a recorded step, the same on every rank.

    `spans[rank]` are the actions in the order in which they ran, in seconds since `started`, by
    the hosts' clocks, as are all times. `held_bytes[rank]` is what waited for B and
    W after each of them, counted by storage, `peak_activation_bytes[rank]` its largest value;
    `bytes_sent[rank]` what the rank's sends carried. `step_time` is the seconds from the first
    rank's begin to the last one's end. `schedule` is what was run, `program` the manifest of the
    program that it was compiled to. `print(pipe.last_step)` shows where the time of each rank went.
    """

    spans: Spans
    held_bytes: Mapping[int, Sequence[int]]
    bytes_sent: Mapping[int, int]
    step_time: float
    started: float
    in_process: bool
    schedule: Schedule = field(repr=False)
    program: Mapping[str, Any] = field(repr=False)

    @property
    def peak_activation_bytes(self) -> dict[int, int]:
        return {rank: max(samples) for rank, samples in self.held_bytes.items()}

    @cached_property
    def costs(self) -> Costs:
        """The mean seconds of every pass, and the delay of a message (`recorded_costs`)."""
        return recorded_costs(self.schedule, self.spans)

    @cached_property
    def timeline(self) -> Timeline:
        """The passes as they ran, in the simulator's terms: pictures, idle intervals, the critical
        path."""
        return recorded_timeline(self.schedule, self.spans, self.costs)

    @cached_property
    def idle(self) -> dict[int, dict[str, float]]:
        """The seconds without a pass of each rank by cause, from the first start to the last end of
        all ranks.

        `zbcompile.schedules.simulation.idle_causes` defines the causes. Empty in one process, where
        ranks take turns.
        """
        causes = () if self.in_process else self.timeline.idle_by_cause
        return {
            rank: {str(cause): time for cause, time in idle.items()}
            for rank, idle in enumerate(causes)
        }

    def as_ranks(self, memory: Costs | None = None) -> Timeline:
        """The passes as they ran; of ranks that took turns in one process, replayed as if each had
        its own. What a pass holds is taken from `memory`, if it is given, in its unit."""
        costs = self.costs
        if memory is not None:
            overrides = {
                name: getattr(memory, name)
                for name in ("activation", "residue", "vocab_state", "memory_unit")
            }
            costs = replace(costs, **overrides)
        if self.in_process:
            return simulate(self.schedule, costs)
        return recorded_timeline(self.schedule, self.spans, costs)

    def __str__(self) -> str:
        """The time and the idle time of every rank, by cause."""
        timeline = self.as_ranks()
        suffix = ", as if each rank had a process of its own" * self.in_process
        rows = rank_table(timeline).rows
        table_rows = [
            [
                *(figure for figure in row if figure.name != "peak memory"),
                Figure("peak waiting", peak, "B"),
            ]
            for row, peak in zip(rows, [*self.peak_activation_bytes.values(), None], strict=False)
        ]
        idle = (
            f"bubble {format_share(timeline.bubble)}, idle of all ranks"
            f" {format_share(idle_share(timeline))}"
        )
        step = (
            f"step {format_time(timeline.finish, 's')} of {format_time(self.step_time, 's')} for"
            " the call"
        )
        return f"{self.schedule.name}: {step}, {idle}{suffix}\n\n{grid(table_rows)}"

    def _repr_html_(self) -> str:
        """In notebooks, a picture of the step."""
        return to_svg(self.as_ranks())

    def save(self, path: str | Path) -> None:
        """Write the record to a file that `python -m zbcompile.inspect TARGET --measured FILE`
        reads; it is the same on every rank, so the first one is enough.

        >>> pipe.last_step.save("step.json")                      # doctest: +SKIP
        """
        Path(path).write_text(record_to_text(self), encoding="utf-8")

    def chrome_trace(self, path: str | Path) -> None:
        """Writes the step as a trace (JSON) for chrome://tracing and ui.perfetto.dev: a thread for
        each rank with its actions and idle intervals, and an arrow for each message.

        >>> pipe.last_step.chrome_trace("step.json")              # doctest: +SKIP
        """
        Path(path).write_text(to_chrome_trace(self.as_ranks()), encoding="utf-8")


def record_to_text(record: StepRecord) -> str:
    """Returns the record as JSON; times in seconds, with the nine digits that a clock has."""
    writers: Converters = {
        float: lambda seconds: round(seconds, 9),
        Schedule: lambda schedule: json.loads(to_json(schedule)),
    }
    data = to_plain(record, writers)
    return to_text({"format": FORMAT, "version": VERSION, **data}, 3)


def is_record(data: Any) -> bool:
    """Returns True if the value in a JSON file has the format of a record."""
    return isinstance(data, dict) and data.get("format") == FORMAT


def read_record(path: str | Path) -> StepRecord:
    """Read what `StepRecord.save` wrote. Raises PipelineError for anything else, OSError if there
    is no file."""
    text = read_text(path, PipelineError)
    return record_from(parse_json(text, PipelineError, f"{path} is not a step record: "), path)


def record_from(data: Any, path: str | Path) -> StepRecord:
    """The record whose value in the JSON file `path` is `data`. Raises PipelineError."""
    if not is_record(data):
        raise PipelineError(
            f"{path} is not a step record; write one with pipe.record = True; pipe.last_step.save."
        )
    if data.get("version") != VERSION:
        version = f"{data.get('version')!r:.80}"
        raise PipelineError(
            f"{path} has format version {version}; this release reads version {VERSION}."
        )
    readers: Converters = {
        Any: lambda value: value,
        Schedule: lambda schedule: from_dict(schedule).compute_only(),
    }
    with damage_in(Path(path), "Record the step again"):
        record: StepRecord = from_plain(StepRecord, data, readers)
        if not record.spans.keys() == record.held_bytes.keys() == record.bytes_sent.keys():
            raise ValueError("held_bytes, bytes_sent and spans are of different ranks")
        _ = record.timeline  # every pass of the schedule is there
    return record
