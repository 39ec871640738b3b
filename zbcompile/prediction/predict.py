"""The time and memory of a step, predicted from the compiled graphs without running them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zbcompile.compiler.stage_price import (
    StagePrice,
    bytes_of,
    costs_of,
    pass_seconds,
    price_of,
)
from zbcompile.compiler.vocabulary_sharding import with_shard_times
from zbcompile.errors import PipelineError
from zbcompile.passes.machine.hardware import Hardware, hardware_for
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.prediction.measure_passes import measure_passes
from zbcompile.program.program import Program
from zbcompile.program.step_record import is_record, record_from
from zbcompile.schedules import Costs, simulate
from zbcompile.schedules.ir.actions import SENDS, flatten
from zbcompile.schedules.ir.costs import Link
from zbcompile.schedules.ir.kinds import MESSAGE_OPS
from zbcompile.schedules.visualization.svg import to_svg
from zbcompile.untrusted_text import read_json

NAMED_COSTS = ("flops", "uniform", "measured")


@dataclass(frozen=True)
class Basis:
    """Costs and where they are from: `unit` of the times ("s" or "passes"), `text` for a reader;
    the `prices` that they are from, if they are from any."""

    costs: Costs
    unit: str
    text: str
    prices: tuple[StagePrice, ...] = ()


def basis_of(program: Program, source: str) -> Basis:
    """The costs called `source`: "flops" (FLOPs and bytes on the program's hardware), "uniform",
    "measured" (the graphs are run here and now), or a file: JSON as `Costs.to_json` writes it
    (times in seconds), or the record of a step.

    Memory is always that of the graphs, in bytes. Raises PipelineError or ScheduleError for a file
    that does not fit.
    """
    if source == "flops":
        hardware = hardware_of(program)
        messages = "messages over its links" if hardware.within else "messages free"
        exchanges = "; exchanges outside of the pipeline: nominal" if program.exchanges else ""
        text = f"from FLOPs and bytes on {hardware}, {messages}{exchanges}"
        prices = prices_of(program)
        return Basis(predicted_costs(program, prices), "s", text, prices)
    if (
        source == "uniform"
    ):  # the graph of a pass may compute nothing: a stage without parameters has no W
        forward, backward, weight = (
            tuple(
                int(op in stage.pieces and not stage.pieces[op].empty) for stage in program.stages
            )
            for op in "FBW"
        )
        costs = Costs(forward, backward, weight, **bytes_of(program.stages))
        return Basis(costs, "passes", "every pass takes 1 (empty ones 0), messages free")
    if source == "measured":
        text = "passes run on this machine on synthetic values, messages free"
        return Basis(with_memory(measure_passes(program), program), "s", text)
    return _from_file(source, program)


def hardware_of(program: Program) -> Hardware:
    """What the program was compiled for, else the nominal speeds of its device."""
    return program.choices.hardware or hardware_for(program.device_type)


def prices_of(program: Program) -> tuple[StagePrice, ...]:
    """The price of every stage on the program's hardware, where its schedule places it; arguments
    as of `price_of`."""
    how = hardware_of(program), program.choices, program.device_type
    distinct = {stage.original: stage for stage in reversed(program.stages)}
    found = {original: price_of(stage, *how) for original, stage in distinct.items()}
    return tuple(found[stage.original] for stage in program.stages)


def predicted_costs(
    program: Program,
    prices: Sequence[StagePrice] = (),
) -> Costs:
    """Seconds of the passes by their operations on the program's hardware, and its links; `prices`
    are those of the stages, if they are known already (`prices_of`)."""
    hardware = hardware_of(program)
    costs = costs_of(prices or prices_of(program), **_links(program, hardware))
    if program.vocabulary is None:
        return costs
    shards = [
        {op: pass_seconds(piece, hardware) for op, piece in pieces.items()}
        for pieces in program.vocabulary.pieces
    ]
    return with_shard_times(costs, program.schedule, program.vocabulary, shards)


def figure_of(program: Program) -> str:
    """The picture of the predicted step, for a notebook."""
    return to_svg(simulate(program.lowered, predicted_costs(program)))


Program.picture = figure_of


def _links(program: Program, hardware: Hardware) -> dict[str, Any]:
    """The links between every two ranks that exchange messages."""
    if hardware.within is None:
        return {}
    rank, stages = program.schedule.placement.rank, program.schedule.stages
    pairs = {(rank(s), rank(s + 1)) for s in range(stages - 1)}
    apart = {(a, b): hardware.connection(a, b) for pair in pairs for a, b in (pair, pair[::-1])}
    links = [
        Link(*pair, *c)
        for pair, c in sorted(apart.items())
        if c is not None and c != hardware.within
    ]
    return {
        "comm": hardware.within.latency,
        "bandwidth": hardware.within.bandwidth,
        "links": tuple(links),
    }


def with_memory(costs: Costs, program: Program) -> Costs:
    return replace(costs, **bytes_of(program.stages))


def require_costs(source: str) -> None:
    """Raise PipelineError if `source` is neither a name of costs nor a file."""
    if source not in NAMED_COSTS and not Path(source).is_file():
        raise PipelineError(
            f"--costs {source}: no such file; expected {', '.join(NAMED_COSTS)}, a JSON file of"
            " costs or a step's record."
        )


def _from_file(path: str, program: Program) -> Basis:
    require_costs(path)
    data, stages = read_json(path, PipelineError), len(program.stages)
    if is_record(data):
        record = record_from(data, path)
        costs = split_fused(record.costs.resized(stages), program)
        return Basis(with_memory(costs, program), "s", f"mean times of the step recorded in {path}")
    costs = replace(Costs.from_dict(data).resized(stages), time_unit="s")
    return Basis(with_memory(costs, program), "s", f"times from {path}")


def split_fused(costs: Costs, program: Program) -> Costs:
    """A stage that was recorded under BW alone has its time in `backward`; divide it as the FLOPs
    of B and W."""
    pairs = [
        (
            (time * (1 - _share_of_weight(stage)), time * _share_of_weight(stage))
            if not weight
            else (time, weight)
        )
        for time, weight, stage in zip(costs.backward, costs.weight, program.stages, strict=True)
    ]
    return replace(costs, backward=tuple(b for b, _ in pairs), weight=tuple(w for _, w in pairs))


def _share_of_weight(stage: StageProgram) -> float:
    """The part of W in the FLOPs of B and W; 0 if there is no W."""
    whole = stage.flops["B"] + stage.flops["W"]
    return stage.flops["W"] / whole if whole else 0.0


@dataclass(frozen=True)
class Messages:
    """The messages that all ranks send in a step, in number and in bytes."""

    count: int
    bytes: int


def count_messages(program: Program) -> Messages:
    """The messages of one step between different ranks. One message may carry several tensors."""
    sends = Counter(
        a[:2] for order in program.lowered.orders for a in flatten(order) if a.op in SENDS
    )
    sizes = {
        (op, stage): program.stages[stage].message_bytes(MESSAGE_OPS[op]) for op, stage in sends
    }
    return Messages(sends.total(), sum(count * sizes[key] for key, count in sends.items()))
