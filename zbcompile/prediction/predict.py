"""The time and memory of a step, predicted from the compiled graphs without running them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zbcompile.compiler.paired_schedule import with_exchanges
from zbcompile.compiler.vocabulary_sharding import with_shard_times
from zbcompile.errors import PipelineError
from zbcompile.passes.partition.node_costs import machine_for
from zbcompile.passes.stage.peak_memory import transient_bytes
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.prediction.measure_passes import measure_passes
from zbcompile.profiling.step_record import is_record, read_record
from zbcompile.program.program import Program
from zbcompile.schedules import Costs
from zbcompile.schedules.execution.memory import deltas
from zbcompile.schedules.ir.actions import SEND_B, SEND_F, flatten

NAMED_COSTS = ("flops", "uniform", "measured")


@dataclass(frozen=True)
class Basis:
    """Costs and where they are from: `unit` of the times ("s" or "passes"), `text` for a reader."""

    costs: Costs
    unit: str
    text: str


def basis_of(program: Program, source: str) -> Basis:
    """The costs called `source`: "flops", "uniform", "measured" (the graphs are run here and now), or a file: JSON as
    `Costs.to_json` writes it (times in seconds), or the record of a step.

    Memory is always that of the graphs, in bytes. Raises PipelineError or ScheduleError for a file that does not fit.
    """
    if source == "flops":
        speed = machine_for(program.device_type).flops_per_second
        channels = program.choices.channels or "nominal"
        exchanges = f"; exchanges beside the pipeline: {channels}" if program.exchanges else ""
        return Basis(flop_costs(program), "s", f"from FLOPs at {speed / 1e9:g} GFLOP/s, messages free{exchanges}")
    if source == "uniform":  # the graph of a pass may compute nothing: a stage without parameters has no W
        costs = _costs(program, lambda stage, op: int(not stage.pieces[op].empty))
        return Basis(costs, "passes", "every pass takes 1 (empty ones 0), messages free")
    if source == "measured":
        text = "passes run on this machine on synthetic values, messages free"
        return Basis(with_memory(measure_passes(program), program), "s", text)
    return _from_file(source, program)


def _costs(program: Program, time: Callable[[StageProgram, str], float], **others: Any) -> Costs:
    """The memory of the graphs, and the `time` of each pass of each stage."""
    forward, backward, weight = (
        tuple(time(s, op) if op in s.pieces else 0 for s in program.stages) for op in ("F", "B", "W")
    )
    return with_memory(Costs(forward, backward, weight, **others), program)


def flop_costs(program: Program) -> Costs:
    """Seconds of the passes from their FLOPs at the machine's nominal speed; a pass without contractions takes 0."""
    each = 1 / machine_for(program.device_type).flops_per_second
    return costs_at(program, Rates(dict.fromkeys(("F", "B", "W"), each), each))


@dataclass(frozen=True)
class Rates:
    """Seconds per FLOP: by pass, and `mean` for passes that are not there; `comm` and `bandwidth` as in `Costs`.
    `exchanges`: the collectives of the stages take time beside that."""

    by_pass: Mapping[str, float]
    mean: float
    comm: float = 0
    bandwidth: float | None = None
    exchanges: bool = True

    def of(self, op: str) -> float:
        return self.by_pass.get(op, self.mean)


def rates_of(program: Program, costs: Costs) -> Rates:
    """How fast the passes of `program` are under `costs`, over all stages."""
    flops = {op: sum(stage.flops[op] for stage in program.stages) for op in ("F", "B", "W")}
    waits = {op: sum(costs.exchange(op, stage) for stage in range(costs.stages)) for op in flops}
    times = {op: float(sum(costs.times(op))) - waits[op] for op in flops}
    by_pass = {op: times[op] / count for op, count in flops.items() if count}
    mean = sum(times.values()) / (sum(flops.values()) or 1)
    return Rates(by_pass, mean, costs.comm, costs.bandwidth, any(waits.values()))


def costs_at(program: Program, rates: Rates) -> Costs:
    """The passes of `program` at `rates`."""
    links = {"comm": rates.comm, "bandwidth": rates.bandwidth}
    costs = _costs(program, lambda stage, op: stage.flops[op] * rates.of(op), **links)
    if rates.exchanges:
        costs = with_exchanges(costs, program.stages, program.choices, program.device_type)
    if program.vocabulary is None:
        return costs
    shards = [{op: count * rates.of(op) for op, count in flops.items()} for flops in program.vocabulary.flops]
    return with_shard_times(costs, program.schedule, program.vocabulary, shards)


def left_on_last(costs: Costs) -> Costs:
    """`costs` with the output layer whole on the last stage: what S and T of all shards take together, in thirds."""
    third = (sum(costs.vocab_s) + sum(costs.vocab_t)) / 3
    times = {name: getattr(costs, name) for name in ("forward", "backward", "weight")}
    changed: dict[str, Any] = {name: (*each[:-1], each[-1] + third) for name, each in times.items()}
    return replace(costs, **changed | dict.fromkeys(("vocab_s", "vocab_t", "vocab_state"), (0.0,) * costs.stages))


def with_memory(costs: Costs, program: Program) -> Costs:
    stages = program.stages
    return replace(
        costs,
        activation=tuple(stage.crossing.kept for stage in stages),
        residue=tuple(stage.crossing.residue for stage in stages),
        message=tuple(stage.send_bytes for stage in stages),
    )


def require_costs(source: str) -> None:
    """Raise PipelineError if `source` is neither a name of costs nor a file."""
    if source not in NAMED_COSTS and not Path(source).is_file():
        raise PipelineError(
            f"--costs {source}: no such file; expected {', '.join(NAMED_COSTS)}, a JSON file of costs or a step's "
            "record."
        )


def _from_file(path: str, program: Program) -> Basis:
    require_costs(path)
    text = Path(path).read_text(encoding="utf-8")
    stages = len(program.stages)
    if is_record(text):
        record = read_record(path)
        costs = split_fused(record.costs.resized(stages), program)
        return Basis(with_memory(costs, program), "s", f"mean times of the step recorded in {path}")
    return Basis(with_memory(Costs.from_json(text).resized(stages), program), "s", f"times from {path}")


def split_fused(costs: Costs, program: Program) -> Costs:
    """A stage that was recorded under BW alone has its time in `backward`; divide it as the FLOPs of B and W."""
    pairs = [
        (time * (1 - _share_of_weight(stage)), time * _share_of_weight(stage)) if not weight else (time, weight)
        for time, weight, stage in zip(costs.backward, costs.weight, program.stages, strict=True)
    ]
    return replace(costs, backward=tuple(b for b, _ in pairs), weight=tuple(w for _, w in pairs))


def _share_of_weight(stage: StageProgram) -> float:
    """The part of W in the FLOPs of B and W; 0 if there is no W."""
    whole = stage.flops["B"] + stage.flops["W"]
    return stage.flops["W"] / whole if whole else 0.0


def running_peaks(program: Program, costs: Costs) -> tuple[int, ...]:
    """The most bytes that each rank holds while a pass runs: what waits for other passes, and what this one needs.

    The two of a pair count one after the other; vocabulary passes count only with what they keep.
    """
    inside = {(stage.stage, op): transient_bytes(stage, op) for stage in program.stages for op in stage.pieces}
    own = {"F": [0.0] * len(program.stages), "B": costs.activation, "W": costs.residue, "BW": costs.activation}
    peaks = []
    for order in program.schedule.orders:
        held, peak = 0.0, 0.0
        for action, change in zip(flatten(order), deltas(order, costs), strict=True):
            if action.op in own:
                peak = max(peak, held - own[action.op][action.stage] + inside[action.stage, action.op])
            held += change
            peak = max(peak, held)
        peaks.append(int(peak))
    return tuple(peaks)


@dataclass(frozen=True)
class Messages:
    """The messages that all ranks send in a step, in number and in bytes."""

    count: int
    bytes: int


def count_messages(program: Program) -> Messages:
    """The messages of one step between different ranks. One message may carry several tensors."""
    sends = [a for order in program.lowered.programs for a in flatten(order) if a.op in (SEND_F, SEND_B)]
    forward = [stage.send_bytes for stage in program.stages]
    backward = [sum(spec.bytes for spec in stage.gradients_out.values()) for stage in program.stages]
    return Messages(len(sends), sum((forward if a.op == SEND_F else backward)[a.stage] for a in sends))
