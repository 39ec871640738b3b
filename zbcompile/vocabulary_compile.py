"""Vocabulary parallelism in the compiler: what is sharded, how, and the schedule that runs the pieces."""

from dataclasses import dataclass, replace

import torch

from zbcompile.passes.canonical import Canonical
from zbcompile.passes.choices import Choices
from zbcompile.passes.errors import CompileError
from zbcompile.passes.stage_program import StageProgram
from zbcompile.passes.vocabulary_head import VocabularyHead, find_head
from zbcompile.passes.vocabulary_logits import NotShardable
from zbcompile.passes.vocabulary_program import VocabularyProgram, even_bounds, make_vocabulary
from zbcompile.passes.vocabulary_trunk import cut_off
from zbcompile.schedules.costs import Costs
from zbcompile.schedules.schedule import Schedule
from zbcompile.schedules.vocabulary_insertion import with_vocabulary

LEAN_BYTES = 256 << 20  # logits of a shard beyond this are made again in T instead of kept, tile by tile


@dataclass(frozen=True)
class Sharding:
    """An output layer to be sharded. `whole` is the graph that it was found in, `trunk` the model without it."""

    whole: Canonical
    head: VocabularyHead
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


def find_sharding(canonical: Canonical, choices: Choices) -> Sharding | None:
    """What `vocab=` asks for; None where it asks for nothing. Raises CompileError where it cannot be."""
    if choices.vocab == "off" or (choices.vocab == "auto" and choices.exact):
        return None
    if choices.exact:
        raise CompileError(
            f"vocab={choices.vocab} sums over the vocabulary in another order than eager; exact=True cannot have it. "
            'Use exact=False, or vocab="off".'
        )
    try:
        head = find_head(canonical)
    except NotShardable as reason:
        if choices.vocab == "auto":
            return None
        raise CompileError(f'vocab={choices.vocab}: {reason}. Use vocab="off".') from reason
    return Sharding(canonical, head, cut_off(canonical, head))


def shard(sharding: Sharding, schedule: Schedule, choices: Choices) -> VocabularyProgram:
    """The graphs of every rank's shard."""
    barriers = choices.vocab if isinstance(choices.vocab, int) else 1
    bounds = even_bounds(sharding.head.size, schedule.ranks)
    tile = tile_of(sharding.head, bounds)
    return make_vocabulary(sharding.whole, sharding.head, sharding.activation, bounds, barriers, tile, choices)


def tile_of(head: VocabularyHead, bounds: tuple[tuple[int, int], ...]) -> int | None:
    """How many words to work on at a time where the logits of a shard are too large to wait from S to T; else None."""
    tokens = head.linear.meta["val"].numel() // head.size
    words = max(high - low for low, high in bounds)
    item = head.dtype.itemsize
    if tokens * words * item <= LEAN_BYTES:
        return None
    return max(1, LEAN_BYTES // (4 * tokens * item))


def insert(schedule: Schedule, vocabulary: VocabularyProgram, stages: tuple[StageProgram, ...]) -> Schedule:
    """`schedule` with the vocabulary passes placed by the FLOPs of the graphs; as it is where it has them already."""
    if schedule.shards:
        if schedule.barriers != vocabulary.barriers:
            raise CompileError(
                f"schedule= has vocabulary passes with {schedule.barriers} barriers, vocab= asks for "
                f"{vocabulary.barriers}. Make them equal."
            )
        return schedule
    return with_vocabulary(schedule, vocabulary.barriers, flop_costs(schedule, vocabulary, stages))


def flop_costs(schedule: Schedule, vocabulary: VocabularyProgram, stages: tuple[StageProgram, ...]) -> Costs:
    """Times in FLOPs; a pass without any counts as one."""
    passes = {op: tuple(stage.flops[op] or 1 for stage in stages) for op in ("F", "B", "W")}
    costs = Costs(passes["F"], passes["B"], passes["W"])
    return with_vocabulary_costs(costs, schedule, vocabulary, 1.0)


def with_vocabulary_costs(costs: Costs, schedule: Schedule, vocabulary: VocabularyProgram, speed: float) -> Costs:
    """`costs` with S and T of every rank's shard, at `speed` FLOPs a second, on the stage that names the shard."""
    scan, update, state = ([0.0] * schedule.stages for _ in range(3))
    for rank, flops in enumerate(vocabulary.flops):
        stage = schedule.placement.stages_of(rank)[0]
        scan[stage], update[stage] = flops["S"] / speed, flops["T"] / speed
        state[stage] = vocabulary.state_bytes(rank)
    return replace(costs, vocab_s=tuple(scan), vocab_t=tuple(update), vocab_state=tuple(state))
