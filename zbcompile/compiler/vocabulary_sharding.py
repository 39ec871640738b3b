"""Vocabulary parallelism in the compiler: whether to shard the output layer, and the schedule that
runs its passes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.cost.hardware import Hardware, default_hardware
from zbcompile.passes.errors import CompileError, PartitionError
from zbcompile.passes.partition.balance import LoadRow
from zbcompile.passes.partition.balance_stages import balanced_cuts, node_loads
from zbcompile.passes.partition.cut_points import forward_line
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.vocabulary.output_layer import NotShardableError
from zbcompile.passes.vocabulary.shard import shard_passes
from zbcompile.passes.vocabulary.shard_program import Bounds, VocabularyProgram, even_bounds
from zbcompile.passes.vocabulary.trunk import ShardedStep, cut_output_layer
from zbcompile.schedules import Costs, Placement, Schedule, ScheduleError, simulate, with_vocabulary

WORTH = 0.95  # share of the step without sharding: the gain must pay for the collectives
INFINITE = float("inf")


def choose_sharding(
    step: StepGraph, schedule: Schedule | None, choices: CompileOptions
) -> ShardedStep | None:
    """Returns the step with its output layer cut off if `vocab=` asks for it, else None.

    "auto" shards if there is an output layer and the predicted step is 5 % shorter; without a
    schedule whatever can be sharded.

    Raises:
        CompileError: vocab=1 or 2, and the output layer cannot be sharded.
    """
    if choices.vocab == "off" or (choices.vocab == "auto" and choices.exact):
        return None
    try:
        sharded = cut_output_layer(step)
    except NotShardableError as reason:
        if choices.vocab == "auto":
            return None
        raise CompileError(f'vocab={choices.vocab}: {reason} Use vocab="off".') from reason
    if choices.vocab != "auto" or schedule is None or schedule.shards:
        return sharded
    hardware = choices.hardware or default_hardware(step.device_type)
    unsharded, divided = predict_steps(sharded, schedule, hardware)
    return sharded if divided < WORTH * unsharded else None


def predict_steps(
    sharded: ShardedStep, schedule: Schedule, hardware: Hardware
) -> tuple[float, float]:
    """Returns the length of the step with the output layer on the last stage, and with an equal
    part of its words on every rank, in seconds.

    Messages are free; infinite if there are no cuts.
    """
    model_loads, trunk_loads = (
        _loads(step, schedule.placement, hardware) for step in (sharded.whole, sharded.trunk)
    )
    if model_loads is None or trunk_loads is None:
        return INFINITE if model_loads is None else _step(schedule, _costs(model_loads)), INFINITE
    share = max(0.0, sum(model_loads) - sum(trunk_loads)) / schedule.ranks
    # Of three products S makes two with one barrier, T one.
    scan, update = ((part * share / 3,) * schedule.stages for part in (2, 1))
    costs = replace(_costs(trunk_loads), vocab_s=scan, vocab_t=update)
    try:
        divided = _step(with_vocabulary(schedule, barriers=1, costs=costs), costs)
    except ScheduleError:
        divided = INFINITE
    return _step(schedule, _costs(model_loads)), divided


def _loads(step: StepGraph, placement: Placement, hardware: Hardware) -> tuple[float, ...] | None:
    """Returns the seconds of each stage with balanced cuts; None if there are no such cuts."""
    line = forward_line(step)
    ranks_of = [placement.rank(stage) for stage in range(placement.stages)]
    try:
        cuts = balanced_cuts(step, line, ranks_of, hardware)
    except PartitionError:
        return None
    totals = [0.0, *accumulate(node_loads(step, line, hardware))]
    return LoadRow(totals, ranks_of).stage_loads(list(cuts))


def _costs(loads: tuple[float, ...]) -> Costs:
    thirds = tuple(load / 3 for load in loads)
    return Costs(thirds, thirds, thirds)


def _step(schedule: Schedule, costs: Costs) -> float:
    return float(simulate(schedule, costs).makespan)


def shard(
    sharded: ShardedStep,
    schedule: Schedule,
    choices: CompileOptions,
    stages: tuple[StageProgram, ...],
    bounds: Bounds | None,
) -> tuple[VocabularyProgram, Schedule]:
    """Returns the passes of every rank's shard, and the schedule with these passes.

    `bounds` are given if rows have their ranks already.
    """
    bounds = bounds or even_bounds(sharded.loss.words, schedule.ranks)
    barriers = choices.vocab if isinstance(choices.vocab, int) else 1
    vocabulary = shard_passes(sharded, bounds, barriers, choices.dtype_of_sum)
    inserted = insert(schedule, vocabulary, stages)
    return vocabulary, inserted


def insert(
    schedule: Schedule, vocabulary: VocabularyProgram, stages: Sequence[StageProgram]
) -> Schedule:
    """Returns the schedule with the vocabulary passes placed by the FLOPs of the graphs."""
    lookups = vocabulary.lookup is not None
    if schedule.shards:
        if schedule.barriers != vocabulary.barriers:
            raise CompileError(
                f"schedule= has vocabulary passes with {schedule.barriers} barriers, vocab= asks "
                f"for {vocabulary.barriers}. Make them equal."
            )
        return replace(schedule, lookups=lookups)
    costs = flop_costs(schedule, vocabulary, stages)
    return replace(with_vocabulary(schedule, vocabulary.barriers, costs), lookups=lookups)


def flop_costs(
    schedule: Schedule, vocabulary: VocabularyProgram, stages: Sequence[StageProgram]
) -> Costs:
    """Returns the costs of all passes in FLOPs; a pass without any counts as one."""
    passes = {op: tuple(stage.flops[op] or 1 for stage in stages) for op in ("F", "B", "W")}
    costs = Costs(passes["F"], passes["B"], passes["W"])
    return with_shard_times(costs, schedule, vocabulary, vocabulary.flops)


def with_shard_times(
    costs: Costs,
    schedule: Schedule,
    vocabulary: VocabularyProgram,
    times: Sequence[Mapping[str, float]],
) -> Costs:
    """Returns the costs with the times of S and T of every rank, on the first stage of the rank."""
    scan, update, state = ([0.0] * schedule.stages for _ in range(3))
    for rank, seconds in enumerate(times):
        stage = schedule.placement.stages_of(rank)[0]
        scan[stage], update[stage] = seconds["S"], seconds["T"]
        state[stage] = vocabulary.state_bytes(rank)
    return replace(costs, vocab_s=tuple(scan), vocab_t=tuple(update), vocab_state=tuple(state))
