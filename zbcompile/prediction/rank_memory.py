"""Predicts what each rank holds at every moment of a step, by walking through its lowered order:
parameters, gradients, optimizer state, activations, messages, the copies of collectives."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from zbcompile.compiler.stage_price import running_of
from zbcompile.distributed.parcels import ALONE_BYTES
from zbcompile.engine.stage import received_specs
from zbcompile.passes.graph.fx import output_values, tensors_of
from zbcompile.passes.graph.storage import storage_bytes
from zbcompile.passes.partition.memory_estimate import (
    ALONE,
    ReplicaSharding,
    gradient_bytes,
    state_bytes,
)
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import storage_key
from zbcompile.prediction.predict import prices_of
from zbcompile.program.program import Program
from zbcompile.schedules import Costs
from zbcompile.schedules.execution.memory import deltas
from zbcompile.schedules.ir.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    B,
    F,
    flatten,
)
from zbcompile.schedules.ir.dependencies import DIRECTION
from zbcompile.schedules.ir.kinds import MESSAGE_OPS, result_of
from zbcompile.schedules.lowering.edges import Message, edges_of


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. `activations` and `messages` are the most of each at any moment of a step,
    `peak` the most of all together, which need not be their sum. Not predicted: what the allocator
    rounds up and cannot use in fragments, what kernels and libraries take for themselves, the
    user's batch.

    * `parameters`: with buffers.
    * `gradients`: the sums over microbatches, in their dtype; with `zero=1` this replica's part of
      the sums over replicas as well.
    * `optimizer_state`: with float32 masters of half-precision parameters.
    * `activations`: what waits between the passes, and what the pass needs that runs.
    * `messages`: what was received and is not read yet, what was sent and is not known to have
      arrived.
    * `collectives`: the copies in which small gradients travel to other replicas.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    messages: int
    collectives: int
    peak: int


class HeldBytes(NamedTuple):
    """One moment of a step, behind the action `after` or, if that is None, within one: bytes of
    activations, of messages, and of the sums that stages have made so far of a gradient to which
    several contribute.
    """

    activations: float
    messages: float
    sums: float
    after: Action | None = None

    @property
    def total(self) -> float:
        return self.activations + self.messages + self.sums


def rank_memories(
    program: Program,
    costs: Costs,
    model: Mapping[str, torch.Tensor],
    sharding: ReplicaSharding = ALONE,
    running: Mapping[str, Sequence[float]] | None = None,
) -> tuple[RankMemory, ...]:
    """What every rank holds; `model` has the parameters and buffers by name, `costs` the bytes of
    the program, and `running` those of its passes, if they are known already (`running_of`)."""
    moments = partial(
        held_in_step, program, costs, running or running_of(prices_of(program)), model
    )
    return tuple(
        _memory(rank, program, list(moments(rank)), model, sharding)
        for rank in range(program.schedule.ranks)
    )


def _memory(
    rank: int,
    program: Program,
    moments: list[HeldBytes],
    model: Mapping[str, torch.Tensor],
    sharding: ReplicaSharding,
) -> RankMemory:
    held = list(_resident(rank, program, model))
    trained = [(value, share) for value, share, trains in held if trains]
    sums = [
        share * gradient_bytes(v, program.choices.dtype_of_sum(v.dtype)) for v, share in trained
    ]
    gradients, replicas = sum(sums), sharding.replicas
    state = sum(share * state_bytes(v, program.choices.optimizer_state) for v, share in trained)
    parameters = sum(share * value.nbytes for value, share, _ in held)
    collectives = small_bytes(sums) if replicas > 1 else 0
    parts = gradients / replicas if sharding.zero == 1 and replicas > 1 else 0
    state /= sharding.state_parts
    last, waiting, stays = (
        moments[-1],
        max(moment.total for moment in moments),
        parameters + gradients + state,
    )
    return RankMemory(
        parameters=int(parameters),
        gradients=int(gradients + parts + last.sums),
        optimizer_state=int(state),
        activations=int(max(m.activations for m in moments)),
        messages=int(max(m.messages for m in moments)),
        collectives=int(collectives),
        peak=int(stays + max(waiting, parts + collectives + last.messages + last.sums)),
    )


def _resident(
    rank: int, program: Program, model: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, float, bool]]:
    """The parameters and buffers of a rank: each with the share of it that the rank has, and
    whether the rank trains it."""
    stages = [program.stages[stage] for stage in program.stages_of(rank)]
    rows = program.vocabulary.parameters if program.vocabulary is not None else ()
    trained = {name for stage in stages for name in stage.trained}
    names = {name for stage in stages for name in chain(stage.parameters, stage.buffers)} - set(
        rows
    )
    for name in sorted(names & set(model)):
        yield model[name], 1.0, name in trained
    for name in sorted(set(rows) & set(model)):
        low, high = program.vocabulary.bounds[rank]  # type: ignore[union-attr]
        yield model[name], (high - low) / program.vocabulary.bounds[-1][1], True  # type: ignore[union-attr]


def _sums(program: Program, model: Mapping[str, torch.Tensor], stage: int) -> int:
    """Bytes of the sums that a stage makes, besides `.grad`, of parameters that other stages train
    as well."""
    values = (
        model[name] for name in program.shared & set(model) & set(program.stages[stage].trained)
    )
    return sum(gradient_bytes(value, program.choices.dtype_of_sum(value.dtype)) for value in values)


def held_in_step(
    program: Program,
    costs: Costs,
    running: Mapping[str, Sequence[float]],
    model: Mapping[str, torch.Tensor],
    rank: int,
) -> Iterator[HeldBytes]:
    """What a rank holds while each of its passes runs, and behind it, besides what it holds all the
    time."""
    messages = _Messages(program, rank)
    waiting = 0.0
    sums: dict[int, int] = {}
    own = {
        "F": [0.0] * len(program.stages),
        "B": costs.activation,
        "W": costs.residue,
        "BW": costs.activation,
    }
    yield HeldBytes(0.0, messages.bytes, 0.0)
    for action in flatten(program.lowered.orders[rank]):
        messages.before(action)
        if action.op not in COMPUTE:
            continue
        (change,) = deltas((action,), costs)
        if action.op in own:
            needed = running[action.op][action.stage]
            if action.op in ("W", "BW") and action.stage not in sums:
                sums[action.stage] = _sums(program, model, action.stage)
            before = waiting - own[action.op][action.stage] + needed
            yield HeldBytes(before, messages.bytes, sum(sums.values()))
        waiting += change
        yield HeldBytes(waiting, messages.bytes, sum(sums.values()), after=action)
        messages.after(action)
    yield HeldBytes(waiting, messages.bytes, sum(sums.values()))


class _Messages:
    """The messages of a rank, action by action: received and not read yet, sent and not complete.

    gloo reports no completion, so its sends last to the end of the step. On a GPU a send counts
    until the next one of the rank.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.rank = rank
        self.edges = edges_of(program.lowered, rank)
        self.device = torch.device(program.device_type)
        self.waiting: dict[Message, int] = {}
        self.sent: dict[Message, int] = {}

    @property
    def bytes(self) -> int:
        return sum(self.waiting.values()) + sum(self.sent.values())

    def before(self, action: Action) -> None:
        """Counts what is sent or received; what arrived for a pass counts as its activation."""
        edge = self.edges[action]
        if action.op in RECEIVES and edge.carries is not None:
            stage = self.program.stages[action.stage]
            received = received_specs(stage, self.program.random_until, self.device)
            specs = received[MESSAGE_OPS[action.op]]
            self.waiting[edge.carries] = sum(spec.bytes for spec in specs)
        elif action.op in SENDS and edge.carries is not None:
            if self.device.type != "cpu":
                self.sent.clear()
            made = self._made(action.stage, edge.carries)
            self.sent[edge.carries] = made - self._kept(action.stage, edge.carries)
        for message in edge.needs:
            self.waiting.pop(message, None)

    def after(self, action: Action) -> None:
        """Counts what waits for a stage on this rank, and what only a send keeps from now on."""
        for message, peer in self.edges[action].makes:
            if peer == self.rank and message.kind in DIRECTION:
                self.waiting[message] = self._made(action.stage, message)
        if result_of(action.op) == B:  # frees the activations
            sent = Message(F, action.stage + 1, action.microbatch)
            if sent in self.sent:
                self.sent[sent] = self._made(action.stage, sent)

    def _kept(self, stage: int, message: Message) -> int:
        """The bytes of a message that the backward reads again: they count as an activation."""
        if message.kind != F:
            return 0
        program = self.program.stages[stage]
        return sent_and_kept(program.pieces["F"], program.sends.keys())

    def _made(self, stage: int, message: Message) -> int:
        """The bytes of a message that a pass makes."""
        return self.program.stages[stage].message_bytes(message.kind)


def sent_and_kept(forward: PassGraph, leaving: Collection[str]) -> int:
    """The bytes of those activations `leaving` a forward pass that are also saved for its
    backward."""
    values = [
        (slot, node.meta["val"])
        for slot, node in zip(forward.outputs, output_values(forward.module.graph), strict=True)
    ]
    saved = {
        storage_key(t) for slot, value in values if slot.role == "saved" for t in tensors_of(value)
    }
    activations = [
        value for slot, value in values if slot.role == "activation" and slot.name in leaving
    ]
    sent = {storage_key(t): t for value in activations for t in tensors_of(value)}
    return storage_bytes(sent[key] for key in sent.keys() & saved)


def small_bytes(sizes: Iterable[float]) -> float:
    """Bytes of what travels to other replicas in copies."""
    return sum(size for size in sizes if size < ALONE_BYTES)


def copies_bytes(program: Program, rank: int, sizes: Mapping[str, tuple[int, int]]) -> int:
    """What `validate="after"` keeps on a rank until its updates are validated: a copy of what it
    updates (float32 for parameters in half precision) and of the optimizer's state,
    `optimizer_state` bytes per byte of that. With `zero=1` a replica keeps its share of it. `sizes`
    has the elements and bytes of each parameter.
    """
    updated = {name: max(size, 4 * count) for name, (count, size) in sizes.items()}
    names = {name for stage in program.stages_of(rank) for name in program.stages[stage].trained}
    total, vocabulary = 0, program.vocabulary
    if vocabulary is not None:
        (low, high), names = vocabulary.bounds[rank], names.difference(vocabulary.parameters)
        total = sum(
            updated[name] * (high - low) // vocabulary.bounds[-1][1]
            for name in vocabulary.parameters
        )
    return int(
        (total + sum(updated[name] for name in names)) * (1 + program.choices.optimizer_state)
    )
