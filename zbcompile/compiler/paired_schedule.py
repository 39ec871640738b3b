"""What a schedule's exchanges take, and the schedule with pairs that hide them."""

from collections.abc import Sequence
from dataclasses import replace

from zbcompile.compiler.block_prices import exchange_seconds
from zbcompile.compiler.vocabulary_sharding import insert
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.hardware.hardware import hardware_for
from zbcompile.passes.stage.stage_program import Collective, StageProgram, collectives_of
from zbcompile.program.program import Program
from zbcompile.schedules import Costs, Lowered, Schedule, lower
from zbcompile.schedules.searching.pairs import beside, with_pairs


def with_exchanges(costs: Costs, stages: Sequence[StageProgram], choices: Choices, device: str) -> Costs:
    """`costs` of the computation alone, with the time in which F and B wait for collectives. Operators that wait for
    their own exchange hide behind nothing: theirs counts as computation."""
    changed: dict[str, tuple[float, ...]] = {}
    for op, name in (("F", "forward"), ("B", "backward")):
        found = [[each for each in collectives_of(stage) if each.name == op] for stage in stages]
        seconds = [[(each.hides, exchange_seconds(each, choices, device)) for each in of_stage] for of_stage in found]
        whole = [sum(time for _, time in of_stage) for of_stage in seconds]
        changed[name] = tuple(map(sum, zip(getattr(costs, name), whole, strict=True)))
        changed[f"{name}_exchange"] = tuple(sum(time for hides, time in of_stage if hides) for of_stage in seconds)
    return replace(costs, **changed)  # type: ignore[arg-type]


def seen(program: Program, stage: StageProgram) -> tuple[Collective, ...]:
    """The collectives of a stage with the time that each takes, and what it hides behind, how often in a step."""
    found = []
    for each in collectives_of(stage):
        counts = beside(program.schedule, each.name, stage.stage).items() if each.name in ("F", "B") else ()
        behind = ", ".join(f"{what} {count}x" for what, count in counts) if each.hides else "nothing: it waits itself"
        seconds = exchange_seconds(each, program.choices, program.device_type)
        found.append(replace(each, seconds=seconds, behind=behind))
    return tuple(found)


def in_order(program: Program, schedule: Schedule) -> Program:
    """The program with its passes in another order, with S and T where the output layer is sharded."""
    if program.vocabulary is not None and not schedule.shards:
        schedule = insert(schedule, program.vocabulary, program.stages)
    return replace(program, lowered=lower_for(program.stages, schedule, program.choices, program.device_type))


def lower_for(stages: Sequence[StageProgram], schedule: Schedule, choices: Choices, device: str) -> Lowered:
    """The schedule with its messages and, unless `pairs` says otherwise, with pairs that hide the collectives."""
    if schedule.programs:  # its messages are placed for its order
        return lower(schedule)
    hides = any(each.hides for stage in stages for each in collectives_of(stage))
    if choices.pairs == "given" or not hides or any("W" not in stage.pieces for stage in stages):
        return lower(with_pairs(schedule, Costs.uniform(schedule.stages)))
    speed = max((choices.hardware or hardware_for(device)).peak.values())
    forward, backward, weight = (tuple(stage.flops[op] / speed for stage in stages) for op in "FBW")
    kept = tuple(stage.crossing.kept for stage in stages), tuple(stage.crossing.residue for stage in stages)
    costs = with_exchanges(Costs(forward, backward, weight, *kept), stages, choices, device)
    return lower(with_pairs(schedule, costs))
