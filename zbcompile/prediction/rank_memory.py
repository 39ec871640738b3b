"""Predicts what each rank holds at every moment of a step, by walking through its lowered order:
parameters, gradients, optimizer state, activations, messages, the copies of collectives."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from zbcompile.compiler.stage_price import running_of
from zbcompile.distributed.packing import Buffer
from zbcompile.distributed.parcels import ALONE_BYTES
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.storage import storage_bytes, tensors_of
from zbcompile.passes.partition.memory_estimate import (
    ALONE,
    ReplicaSharding,
    gradient_bytes,
    state_bytes,
)
from zbcompile.passes.stage.piece import Piece
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_private import storage_key
from zbcompile.prediction.predict import prices_of
from zbcompile.program.program import Program
from zbcompile.program.receive_buffers import AFTER, arrivals_of, assign_buffers, completed_sends
from zbcompile.schedules import Costs
from zbcompile.schedules.execution.memory import deltas
from zbcompile.schedules.ir.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
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
    * `messages`: receive buffers, which stay from step to step, less what counts as an activation
      while it is in them; what was sent and is not known to have arrived.
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


class _Receiver(NamedTuple):
    """What a plan of receive buffers asks of a stage."""

    program: StageProgram
    device: torch.device
    generator_arrives: bool


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
    """The receive buffers of a rank and its sends under way, action by action."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.rank = rank
        self.receivers: dict[
            int, _Receiver
        ] = {}  # one of each stage, which stays: it is known by its identity
        self.edges = edges_of(program.lowered, rank)
        self.buffers = assign_buffers(program, rank, self._receiver)
        self.completes = completed_sends(program, rank, self.buffers)
        self.pool = _bytes({b for each in self.buffers.values() for b in each if b.number >= 0})
        self.sent: dict[Message, int] = {}
        self.kept: dict[int, int] = {}  # by stage
        self.readers: dict[tuple[int, str], list[frozenset[str]]] = {}  # by stage and event
        self.posted: dict[
            object, int
        ] = {}  # received without a buffer that stays, or from this rank itself
        self.reading: list[
            tuple[int, frozenset[str], tuple[int, int]]
        ] = []  # in buffers, and an activation

    def _receiver(self, action: Action) -> _Receiver:
        index = action.stage
        if index not in self.receivers:
            device = torch.device(self.program.device_type)
            arrives = 0 < index <= self.program.random_until
            self.receivers[index] = _Receiver(self.program.stages[index], device, arrives)
        return self.receivers[index]

    @property
    def bytes(self) -> int:
        reading = sum(size for size, _, _ in self.reading)
        return self.pool - reading + sum(self.sent.values()) + sum(self.posted.values())

    def before(self, action: Action) -> None:
        """What arrived for a pass counts as its activation from now on; what was sent before may
        have arrived."""
        for message in self.completes.get(action, ()):
            self.sent.pop(message, None)
        if action.op in RECEIVES:
            waiting = self.posted.get((action[1:], action.op[-1]), 0)
            alone = _bytes(b for b in self._buffers(action) if b.number < 0)
            self.posted[action[1:], action.op[-1]] = waiting + alone
        elif action.op in SENDS and (sent := self.edges[action].carries) is not None:
            self.sent[sent] = self._made(action.stage, sent) - self._kept(action)
        elif action.op in COMPUTE:
            event = result_of(action.op)
            self.posted.pop((action[1:], event), None)
            for message in self.edges[action].needs:
                self.posted.pop(message, None)
            for buffer, readers in self._arrived(action, event):
                self.reading.append((buffer.spec.bytes, readers, action[1:]))

    def after(self, action: Action) -> None:
        """Buffers behind their last reader are buffers again; what is made for a stage on this rank
        waits."""
        done = AFTER.get(action.op, ())
        self.reading = [r for r in self.reading if r[2] != action[1:] or not r[1].isdisjoint(done)]
        for made, peer in self.edges[action].makes:
            if peer == self.rank and made.kind in DIRECTION:
                self.posted[made] = self._made(action.stage, made)

    def _buffers(self, action: Action) -> Sequence[Buffer]:
        return self.buffers.get(action, ())

    def _arrived(self, action: Action, event: str) -> Iterator[tuple[Buffer, frozenset[str]]]:
        """The buffers of what a pass waited for, each with the passes that read it."""
        found = self._buffers(Action(f"RECV_{event}", *action[1:]))
        if (action.stage, event) not in self.readers:
            arrivals = arrivals_of(self.program.stages[action.stage])
            self.readers[action.stage, event] = [each.readers for each in arrivals.get(event, ())]
        both = zip(
            found, self.readers[action.stage, event], strict=False
        )  # generator state is last
        yield from ((buffer, readers) for buffer, readers in both if buffer.number >= 0)

    def _kept(self, action: Action) -> int:
        """The bytes of a message that the backward reads again: they count as an activation
        already. It has arrived before they are read for the last time."""
        if MESSAGE_OPS[action.op] != F:
            return 0
        stage = self.program.stages[action.stage]
        if action.stage not in self.kept:
            self.kept[action.stage] = sent_and_kept(stage.pieces["F"], stage.sends.keys())
        return self.kept[action.stage]

    def _made(self, stage: int, message: Message) -> int:
        """The bytes of a message that a pass makes."""
        return self.program.stages[stage].message_bytes(message.kind)


def sent_and_kept(forward: Piece, leaving: Collection[str]) -> int:
    """The bytes of those activations `leaving` a forward pass that are also saved for its
    backward."""
    values = [
        (slot, node.meta["val"])
        for slot, node in zip(forward.outputs, output_values(forward.module.graph), strict=True)
    ]
    saved = {
        storage_key(t) for slot, value in values if slot.kind == "saved" for t in tensors_of(value)
    }
    activations = [
        value for slot, value in values if slot.kind == "activation" and slot.name in leaving
    ]
    sent = {storage_key(t): t for value in activations for t in tensors_of(value)}
    return storage_bytes(sent[key] for key in sent.keys() & saved)


def small_bytes(sizes: Iterable[float]) -> float:
    """Bytes of what travels to other replicas in copies."""
    return sum(size for size in sizes if size < ALONE_BYTES)


def _bytes(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.spec.bytes for buffer in buffers)


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
