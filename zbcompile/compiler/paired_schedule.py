"""Lowers schedules, with pairs of passes that hide collectives."""

from collections.abc import Sequence
from dataclasses import replace

from zbcompile.compiler.stage_costs import costs_of
from zbcompile.compiler.vocabulary_sharding import insert
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.cost.hardware import default_hardware
from zbcompile.passes.cost.stage_cost import stage_cost
from zbcompile.passes.stage.stage_program import StageProgram, collectives_of
from zbcompile.program.program import Program
from zbcompile.schedules import Costs, Schedule, lower
from zbcompile.schedules.searching.pairs import with_pairs


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
    pairs = any(collective.hides for stage in stages for collective in collectives_of(stage))
    if choices.pairs == "given" or not pairs or any("W" not in stage.pieces for stage in stages):
        return lower(with_pairs(schedule, Costs.uniform(schedule.stages)))
    hardware = choices.hardware or default_hardware(device)
    return lower(with_pairs(schedule, costs_of(stages, [stage_cost(s, hardware) for s in stages])))
