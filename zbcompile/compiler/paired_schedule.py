"""What a schedule's exchanges take, and the schedule with pairs that hide them."""

from collections.abc import Sequence
from dataclasses import replace

from zbcompile.compiler.stage_price import bytes_of, exchange_of, exchange_seconds
from zbcompile.compiler.vocabulary_sharding import insert
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.machine.hardware import hardware_for
from zbcompile.passes.stage.stage_program import Collective, StageProgram, collectives_of
from zbcompile.program.program import Program
from zbcompile.schedules import Costs, Schedule, lower
from zbcompile.schedules.searching.pairs import with_pairs


def seen(program: Program, stage: StageProgram) -> tuple[Collective, ...]:
    """The collectives of a stage: seconds of each, and what it hides behind, how often in a
    step."""
    found = []
    for each in collectives_of(stage):
        counts = (
            program.schedule.beside(each.name, stage.stage).items()
            if each.name in ("F", "B")
            else ()
        )
        behind = (
            ", ".join(f"{what} {count}x" for what, count in counts)
            if each.hides
            else "nothing: it waits itself"
        )
        seconds = exchange_seconds(each, program.choices, program.device_type)
        found.append(replace(each, seconds=seconds, behind=behind))
    return tuple(found)


def in_order(program: Program, schedule: Schedule) -> Program:
    """The program with its passes in another order, with S and T where the output layer is
    sharded."""
    if program.vocabulary is not None and not schedule.shards:
        schedule = insert(schedule, program.vocabulary, program.stages)
    return replace(
        program, lowered=lower_for(program.stages, schedule, program.choices, program.device_type)
    )


def lower_for(
    stages: Sequence[StageProgram], schedule: Schedule, choices: Choices, device: str
) -> Schedule:
    """The schedule with its messages and, unless `pairs` says otherwise, with pairs that hide the
    collectives."""
    pairs = any(each.hides for stage in stages for each in collectives_of(stage))
    if choices.pairs == "given" or not pairs or any("W" not in stage.pieces for stage in stages):
        return lower(with_pairs(schedule, Costs.uniform(schedule.stages)))
    speed = max((choices.hardware or hardware_for(device)).peak.values())
    times = {op: [stage.flops[op] / speed for stage in stages] for op in "FBW"}
    waits = {op: [exchange_of(stage, op, choices, device) for stage in stages] for op in "FB"}
    forward, backward = (
        tuple(time + wait[0] for time, wait in zip(times[op], waits[op], strict=True))
        for op in "FB"
    )
    in_forward, in_backward = (tuple(wait[1] for wait in waits[op]) for op in "FB")
    costs = Costs(forward, backward, tuple(times["W"]), **bytes_of(stages))
    costs = replace(costs, forward_exchange=in_forward, backward_exchange=in_backward)
    return lower(with_pairs(schedule, costs))
