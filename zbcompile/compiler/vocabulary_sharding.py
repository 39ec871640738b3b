"""Vocabulary parallelism in the compiler: whether to shard, what, how, and the schedule that runs the pieces."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zbcompile.compiler.cut_planning import plan_cuts
from zbcompile.compiler.stage_price import bytes_of
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import CompileError, PartitionError
from zbcompile.passes.gpu import KIND, kind_of
from zbcompile.passes.partition.liveness import lay_out_line
from zbcompile.passes.pass_list.passes_in_order import SHARD, TRUNK
from zbcompile.passes.pass_list.run_passes import SILENT, PassManager
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.vocabulary.embedding import VocabularyLookup, find_lookup
from zbcompile.passes.vocabulary.logits import NotShardable
from zbcompile.passes.vocabulary.output_layer import VocabularyHead, find_head
from zbcompile.passes.vocabulary.shard_program import Bounds, Tiling, VocabularyProgram, even_bounds, levelled_bounds
from zbcompile.schedules import Costs, Schedule, ScheduleError, peak_memory, simulate, with_vocabulary

LEAN_BYTES = 256 << 20  # logits of a shard beyond this are recomputed in T instead of kept
TILE_BYTES = {"cpu": 1 << 20, KIND: 64 << 20}  # of a tile's logits in fp32: S and T need a small multiple of it
MOST_TILES = 32
BALLAST = 0.95  # unequal shards are worth it if they lower the busiest rank's work to this share


@dataclass(frozen=True)
class VocabularySharding:
    """An output layer to be sharded, and the embedding `lookup` that goes with it. `whole` is the graph in
    which they were found, `trunk` the model without them."""

    whole: Canonical
    head: VocabularyHead
    lookup: VocabularyLookup | None
    trunk: Canonical

    @property
    def activation(self) -> str:
        """The name of what the trunk's last stage makes."""
        return next(slot.name for slot, _ in self.trunk.outputs if slot.kind == "activation")

    @property
    def gradient(self) -> dict[str, torch.Tensor]:
        """The fake gradient that comes back for it."""
        node = next(node for slot, node in self.trunk.outputs if slot.kind == "activation")
        with self.trunk.mode:
            value = node.meta["val"]
            return {self.activation: torch.empty(value.shape, dtype=value.dtype, device=value.device)}


def find_sharding(canonical: Canonical, choices: Choices, manager: PassManager = SILENT) -> VocabularySharding | None:
    """The sharding that `vocab=` asks for; None if it asks for none. Raises CompileError if it is impossible."""
    if choices.vocab == "off" or (choices.vocab == "auto" and choices.exact):
        return None
    if choices.exact:
        raise CompileError(
            f"vocab={choices.vocab} sums over the vocabulary in a different order than eager; exact=True cannot use "
            'it. Use exact=False, or vocab="off".'
        )
    try:
        return shard_head(canonical, manager)
    except NotShardable as reason:
        if choices.vocab == "auto":
            return None
        raise CompileError(f'vocab={choices.vocab}: {reason}. Use vocab="off".') from reason


def shard_head(canonical: Canonical, manager: PassManager, rows: Collection[str] | None = None) -> VocabularySharding:
    """The sharding of the output layer and its embedding; `rows` are sharded already. Raises NotShardable."""
    head = find_head(canonical)
    lookup = find_lookup(canonical, head)
    if rows is not None and head.weight not in rows:
        raise NotShardable(f"{head.weight} is not sharded")
    if rows is not None and lookup is not None and lookup.weight not in rows:
        lookup = None
    return VocabularySharding(canonical, head, lookup, manager.run(TRUNK, canonical, head, lookup))


def forward_shards(
    sharding: VocabularySharding, bounds: Bounds, choices: Choices, manager: PassManager
) -> VocabularyProgram:
    """The graphs of every rank's shard for a forward alone: S without a gradient, and what STATS makes of it."""
    tiling = replace(tiling_of(sharding.head, bounds), keep=False)
    inputs = sharding.whole, sharding.head, sharding.activation, bounds, 0, tiling, sharding.lookup, choices
    return manager.run(SHARD, *inputs)  # type: ignore[no-any-return]


def shard(
    sharding: VocabularySharding,
    schedule: Schedule,
    choices: Choices,
    stages: tuple[StageProgram, ...],
    bounds: Bounds | None,
    manager: PassManager = SILENT,
) -> tuple[VocabularyProgram, Schedule]:
    """The graphs of every rank's shard, and `schedule` with their passes.

    `bounds` are given if rows already have their ranks. Raises CompileError if a rank holds more than `memory=`.
    """
    bounds = bounds or bounds_of(sharding.head, schedule, stages)
    barriers = choices.vocab if isinstance(choices.vocab, int) else 1

    def made(tiling: Tiling) -> tuple[tuple[VocabularyProgram, Schedule], float]:
        task = (sharding.whole, sharding.head, sharding.activation, bounds, barriers, tiling, sharding.lookup, choices)
        vocabulary = manager.run(SHARD, *task)
        inserted = insert(schedule, vocabulary, stages)
        return (vocabulary, inserted), _most_bytes(sharding, choices, stages, vocabulary, inserted)

    tiling = tiling_of(sharding.head, bounds)
    found, most = made(tiling)
    if choices.memory is None or most <= choices.memory:
        return found
    if tiling.keep:
        found, most = made(replace(tiling, keep=False))
    if most > choices.memory:
        raise CompileError(
            f"with its shard of the output layer a rank holds {most:,.0f} bytes, more than "
            f"memory={choices.memory:.15g}. "
            'Use more ranks, smaller microbatches, or recompute="selective".'
        )
    return found


def bounds_of(head: VocabularyHead, schedule: Schedule, stages: tuple[StageProgram, ...]) -> Bounds:
    """Equal parts; or more words for ranks with less other work, if that lets the busiest one end much earlier."""
    loads = [
        sum(stages[stage].flops[op] for stage in schedule.placement.stages_of(rank) for op in ("F", "B", "W"))
        for rank in range(schedule.ranks)
    ]
    of_word = 6 * head.width * (head.logits // head.size)
    even = even_bounds(head.size, schedule.ranks)
    levelled = levelled_bounds(head.size, [load / of_word for load in loads])

    def busiest(bounds: Bounds) -> float:
        return max(load + of_word * (high - low) for load, (low, high) in zip(loads, bounds, strict=True))

    gains = busiest(levelled) < BALLAST * busiest(even) and all(high > low for low, high in levelled)
    return levelled if gains else even


def tiling_of(head: VocabularyHead, bounds: Bounds) -> Tiling:
    """How many words to work on at a time, and whether the logits of a shard are to wait from S to T."""
    value = head.linears[0].meta["val"]
    tokens, most = head.logits // head.size, max(high - low for low, high in bounds)
    tile = TILE_BYTES.get(kind_of(value.device), TILE_BYTES[KIND]) // (4 * tokens)
    count = min(math.ceil(most / max(1, tile)), MOST_TILES)
    return Tiling(math.ceil(most / count), keep=tokens * most * head.dtype.itemsize <= LEAN_BYTES)


def _most_bytes(
    sharding: VocabularySharding,
    choices: Choices,
    stages: tuple[StageProgram, ...],
    vocabulary: VocabularyProgram,
    schedule: Schedule,
) -> float:
    """The bytes that the fullest rank holds: parameters, gradients, optimizer state, and what waits between passes."""
    holders = sharding.whole.graph.find_nodes(op="placeholder")
    sizes = {n.meta["slot"].name: n.meta["val"].nbytes for n in holders if n.meta["slot"].kind == "parameter"}
    waiting = peak_memory(schedule, replace(flop_costs(schedule, vocabulary, stages), **bytes_of(stages)))
    times = 2 + choices.optimizer_state
    whole = sharding.head.size
    held = []
    for rank, (low, high) in enumerate(vocabulary.bounds):
        names = {name for stage in schedule.placement.stages_of(rank) for name in stages[stage].parameters}
        rows = sum(sizes[name] * (high - low) / whole for name in vocabulary.parameters)
        own = sum(sizes[name] for name in names - set(vocabulary.parameters))
        held.append(times * (own + rows) + waiting[rank])
    return max(held)


def insert(schedule: Schedule, vocabulary: VocabularyProgram, stages: tuple[StageProgram, ...]) -> Schedule:
    """`schedule` with the vocabulary passes placed by the FLOPs of the graphs; unchanged if it already has them."""
    lookups = vocabulary.lookup is not None
    if schedule.shards:
        if schedule.barriers != vocabulary.barriers:
            raise CompileError(
                f"schedule= has vocabulary passes with {schedule.barriers} barriers, vocab= asks for "
                f"{vocabulary.barriers}. Make them equal."
            )
        return replace(schedule, lookups=lookups)
    inserted = with_vocabulary(schedule, vocabulary.barriers, flop_costs(schedule, vocabulary, stages))
    return replace(inserted, lookups=lookups)


def flop_costs(schedule: Schedule, vocabulary: VocabularyProgram, stages: tuple[StageProgram, ...]) -> Costs:
    """Times in FLOPs; a pass without any counts as one."""
    passes = {op: tuple(stage.flops[op] or 1 for stage in stages) for op in ("F", "B", "W")}
    costs = Costs(passes["F"], passes["B"], passes["W"])
    return with_shard_times(costs, schedule, vocabulary, vocabulary.flops)


def with_shard_times(
    costs: Costs, schedule: Schedule, vocabulary: VocabularyProgram, times: Sequence[Mapping[str, float]]
) -> Costs:
    """`costs` with the times of S and T of every rank's shard, on the stage that names the shard."""
    scan, update, state = ([0.0] * schedule.stages for _ in range(3))
    for rank, found in enumerate(times):
        stage = schedule.placement.stages_of(rank)[0]
        scan[stage], update[stage] = found["S"], found["T"]
        state[stage] = vocabulary.state_bytes(rank)
    return replace(costs, vocab_s=tuple(scan), vocab_t=tuple(update), vocab_state=tuple(state))


INFINITE = float("inf")
WORTH = 0.95  # of the step without: the prediction has no price for the collectives, which the gain must pay


def choose_sharding(
    canonical: Canonical, schedule: Schedule | None, choices: Choices, manager: PassManager = SILENT
) -> VocabularySharding | None:
    """The sharding that `vocab=` asks for; "auto" shards if there is an output layer and it gains 5 % of the step."""
    sharding = find_sharding(canonical, choices, manager)
    if sharding is None or schedule is None or choices.vocab != "auto" or schedule.shards:
        return sharding
    redistributed, sharded = predict_steps(sharding, schedule, choices)
    return sharding if sharded < WORTH * redistributed else None


def predict_steps(sharding: VocabularySharding, schedule: Schedule, choices: Choices) -> tuple[float, float]:
    """Seconds of the step of `schedule` with the output layer on the last stage, cut by the balancer, and with an equal
    part of its words on every rank; at nominal speeds, messages free, infinite if it is impossible."""
    whole, trunk = (_loads(each, schedule, choices) for each in (sharding.whole, sharding.trunk))
    if whole is None or trunk is None:
        return INFINITE if whole is None else _step(schedule, _costs(whole)), INFINITE
    share = max(0.0, sum(whole) - sum(trunk)) / schedule.ranks  # of three products; S makes two with one barrier
    scan, update = ((part * share / 3,) * schedule.stages for part in (2, 1))
    costs = replace(_costs(trunk), vocab_s=scan, vocab_t=update)
    try:
        sharded = _step(with_vocabulary(schedule, barriers=1, costs=costs), costs)
    except ScheduleError:
        sharded = INFINITE
    return _step(schedule, _costs(whole)), sharded


def _loads(canonical: Canonical, schedule: Schedule, choices: Choices) -> tuple[float, ...] | None:
    """The load of each stage; None if there are no such cuts."""
    try:
        return plan_cuts(lay_out_line(canonical), schedule, choices).loads
    except PartitionError:
        return None


def _costs(loads: tuple[float, ...]) -> Costs:
    thirds = tuple(load / 3 for load in loads)
    return Costs(thirds, thirds, thirds)


def _step(schedule: Schedule, costs: Costs) -> float:
    return float(simulate(schedule, costs).makespan)
