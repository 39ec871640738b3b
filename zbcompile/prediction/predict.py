"""Predicts the time of a step from the compiled graphs, without running them."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zbcompile.compiler.stage_costs import bytes_of, costs_of
from zbcompile.compiler.vocabulary_sharding import with_shard_times
from zbcompile.errors import PipelineError
from zbcompile.passes.cost.hardware import Hardware, default_hardware
from zbcompile.passes.cost.node_cost import graph_seconds
from zbcompile.passes.cost.stage_cost import StageCost, stage_cost
from zbcompile.prediction.measure_passes import measure_passes
from zbcompile.program.program import Program
from zbcompile.program.step_record import is_record, record_from
from zbcompile.schedules import Costs
from zbcompile.schedules.ir.actions import SENDS, flatten
from zbcompile.schedules.ir.costs import Link
from zbcompile.schedules.ir.kinds import MESSAGE_OPS
from zbcompile.untrusted_text import read_json

NAMED_COSTS = ("flops", "measured")


@dataclass(frozen=True)
class CostSource:
    """Costs in seconds and bytes, and a text that says where they are from."""

    costs: Costs
    text: str


def load_costs(program: Program, source: str) -> CostSource:
    """Returns the costs of a program.

    Args:
        source: "flops" (FLOPs and bytes on the program's hardware), "measured" (the graphs run here
            and now), or a file: JSON as `Costs.to_json` writes it, or the record of a step. Memory
            is always that of the graphs.

    Raises:
        PipelineError, ScheduleError: A file does not fit.
    """
    if source == "flops":
        text = f"from FLOPs and bytes on {hardware_of(program)}"
        return CostSource(predicted_costs(program), text)
    if source == "measured":
        costs, text = measure_passes(program), "from passes measured here, messages free"
        return CostSource(replace(costs, **bytes_of(program.stages)), text)
    require_costs(source)
    data, stages = read_json(source, PipelineError), len(program.stages)
    if is_record(data):
        costs = _split_fused(record_from(data, source).costs.resized(stages), program)
        text = f"from the step recorded in {source}"
    else:
        costs = replace(Costs.from_dict(data).resized(stages), time_unit="s")
        text = f"from {source}"
    return CostSource(replace(costs, **bytes_of(program.stages)), text)


def require_costs(source: str) -> None:
    """Raises PipelineError if `source` is neither a name of costs nor a file."""
    if source not in NAMED_COSTS and not Path(source).is_file():
        raise PipelineError(
            f"--costs {source}: no such file; expected {', '.join(NAMED_COSTS)}, a JSON file of"
            " costs or a step's record."
        )


def hardware_of(program: Program) -> Hardware:
    """Returns the hardware that the program was compiled for."""
    return program.choices.hardware or default_hardware(program.device_type)


def predicted_costs(program: Program) -> Costs:
    """Returns the seconds of all passes and messages on the program's hardware."""
    hardware = hardware_of(program)
    costs = costs_of(program.stages, stage_costs(program), **_links(program, hardware))
    if program.vocabulary is None:
        return costs
    shards = [
        {op: graph_seconds(piece.module.graph, hardware) for op, piece in pieces.items()}
        for pieces in program.vocabulary.pieces
    ]
    return with_shard_times(costs, program.schedule, program.vocabulary, shards)


def stage_costs(program: Program) -> tuple[StageCost, ...]:
    """Returns the cost of every stage; equal stages are priced once."""
    hardware = hardware_of(program)
    distinct = {stage.original: stage for stage in reversed(program.stages)}
    costs = {original: stage_cost(stage, hardware) for original, stage in distinct.items()}
    return tuple(costs[stage.original] for stage in program.stages)


def _links(program: Program, hardware: Hardware) -> dict[str, Any]:
    """Returns the connections between neighbours of the pipeline, as fields of costs."""
    within = hardware.within
    if within is None:
        return {}
    rank, stages = program.schedule.placement.rank, program.schedule.stages
    pairs = {(rank(stage), rank(stage + 1)) for stage in range(stages - 1)}
    pairs |= {pair[::-1] for pair in pairs}
    connections = [(pair, hardware.connection(*pair) or within) for pair in sorted(pairs)]
    links = tuple(
        Link(*pair, link.latency, link.bandwidth) for pair, link in connections if link != within
    )
    return {"comm": within.latency, "bandwidth": within.bandwidth, "links": links}


def _split_fused(costs: Costs, program: Program) -> Costs:
    """Returns recorded costs in which the time of BW is divided as the FLOPs of B and W."""
    pairs = []
    for time, weight, stage in zip(costs.backward, costs.weight, program.stages, strict=True):
        total = stage.flops["B"] + stage.flops["W"]
        share = 0.0 if weight or not total else stage.flops["W"] / total
        pairs.append((time * (1 - share), weight or time * share))
    return replace(costs, backward=tuple(b for b, _ in pairs), weight=tuple(w for _, w in pairs))


def count_messages(program: Program) -> tuple[int, int]:
    """Returns the number and the bytes of the messages between ranks in one step."""
    sends = Counter(
        action[:2]
        for order in program.lowered.orders
        for action in flatten(order)
        if action.op in SENDS
    )
    sizes = (
        count * program.stages[stage].message_bytes(MESSAGE_OPS[op])
        for (op, stage), count in sends.items()
    )
    return sends.total(), sum(sizes)
