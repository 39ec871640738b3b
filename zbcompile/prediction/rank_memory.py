"""Predicts what each rank holds in a step: parameters, gradients, optimizer state, activations and
messages, by a walk through its lowered order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from zbcompile.distributed.transport import PENDING_SENDS
from zbcompile.engine.stage import received_specs
from zbcompile.passes.compile_options import HALF
from zbcompile.passes.graph.fx import output_values, tensors_of
from zbcompile.passes.graph.roles import ACTIVATION, GRADIENT, SAVED, Slot
from zbcompile.passes.graph.storage import storage_bytes, storages_behind
from zbcompile.passes.stage.peak_memory import transient_bytes
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_private import storage_key
from zbcompile.prediction.predict import stage_costs
from zbcompile.program.edges import Message, edges_of
from zbcompile.program.program import Program
from zbcompile.schedules import Costs
from zbcompile.schedules.execution.memory import deltas
from zbcompile.schedules.ir.actions import BW, COMPUTE, RECEIVES, SENDS, Action, B, F, W, flatten
from zbcompile.schedules.ir.dependencies import DIRECTION
from zbcompile.schedules.ir.kinds import MESSAGE_OPS


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank in a step.

    Not predicted are what the allocator rounds up and loses to fragments, workspaces of kernels and
    libraries, and the user's batch.

    Attributes:
        parameters: With buffers.
        gradients: The sums over microbatches, in their dtype.
        optimizer_state: With float32 masters of half-precision parameters.
        activations: The most that waits between passes, with what the running pass needs.
        messages: The most that is received and not read yet, or sent and not known to have
            arrived. What counts as an activation is left out.
        peak: The most of all together.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    messages: int
    peak: int


def rank_memories(
    program: Program, costs: Costs, model: Mapping[str, torch.Tensor]
) -> tuple[RankMemory, ...]:
    """Returns what every rank holds.

    Args:
        costs: The bytes that microbatches keep between the passes.
        model: The parameters and buffers by name.
    """
    peaks = [cost.peak for cost in stage_costs(program)]
    return tuple(
        _rank_memory(rank, program, costs, peaks, model) for rank in range(program.schedule.ranks)
    )


def _rank_memory(
    rank: int,
    program: Program,
    costs: Costs,
    peaks: list[Mapping[str, int]],
    model: Mapping[str, torch.Tensor],
) -> RankMemory:
    parameters = gradients = state = 0.0
    for tensor, share, trainings in _tensors_of(rank, program, model):
        parameters += share * tensor.nbytes
        if trainings:
            itemsize = program.choices.dtype_of_sum(tensor.dtype).itemsize
            gradients += share * trainings * tensor.numel() * itemsize
            master = tensor.numel() * 4 if tensor.dtype in HALF else 0
            state += share * (master + (master or tensor.nbytes) * program.choices.optimizer_state)
    moments = list(_moments(rank, program, costs, peaks, _stage_sums(rank, program, model)))
    resident = parameters + gradients + state
    return RankMemory(
        parameters=int(parameters),
        gradients=int(gradients),
        optimizer_state=int(state),
        activations=int(max(activations for activations, *_ in moments)),
        messages=max(messages for _, messages, _ in moments),
        peak=int(resident + max(map(sum, moments))),
    )


def _tensors_of(
    rank: int, program: Program, model: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, float, int]]:
    """Yields the parameters and buffers of a rank, each with the share of it that the rank holds
    and the number of its gradients.

    The first stage that trains a parameter adds into `.grad`. Where other ranks train it as well,
    every stage has a sum of its own besides.
    """
    stages = [program.stages[stage] for stage in program.stages_of(rank)]
    vocabulary = program.vocabulary
    rows = set(vocabulary.parameters) if vocabulary is not None else set()
    names = {name for stage in stages for name in (*stage.parameters, *stage.buffers)} - rows
    for name in sorted(names & set(model)):
        trainings = sum(name in stage.trained for stage in stages)
        sums = trainings + 1 if name in program.shared else 1
        yield model[name], 1.0, sums if trainings else 0
    for name in sorted(rows & set(model)):
        low, high = vocabulary.bounds[rank]  # type: ignore[union-attr]
        yield model[name], (high - low) / vocabulary.bounds[-1][1], 1  # type: ignore[union-attr]


def _stage_sums(rank: int, program: Program, model: Mapping[str, torch.Tensor]) -> dict[int, int]:
    """Returns the bytes of the sums that a stage has of its own, by stage: those of parameters that
    several stages train. The first W of the stage in a step allocates them."""
    return {
        stage: sum(
            model[name].numel() * program.choices.dtype_of_sum(model[name].dtype).itemsize
            for name in program.shared.intersection(program.stages[stage].trained, model)
        )
        for stage in program.stages_of(rank)
    }


def _moments(
    rank: int,
    program: Program,
    costs: Costs,
    peaks: list[Mapping[str, int]],
    stage_sums: dict[int, int],
) -> Iterator[tuple[float, int, int]]:
    """Yields the bytes of activations and messages while each pass of a rank runs, and, negative,
    those of `stage_sums` that are not allocated yet."""
    waiting_for = {"B": costs.activation, "W": costs.residue, "BW": costs.activation}
    messages = _Messages(rank, program)
    waiting = 0.0
    yield waiting, messages.bytes, -sum(stage_sums.values())
    for action in flatten(program.lowered.orders[rank]):
        messages.before(action)
        if action.op not in COMPUTE:
            continue
        stage = action.stage
        if action.op in (BW, W):
            stage_sums.pop(stage, None)
        absent = -sum(stage_sums.values())
        if action.op in peaks[stage]:  # S and T need nothing besides
            inputs = waiting_for[action.op][stage] if action.op in waiting_for else 0.0
            peak = peaks[stage][action.op] + messages.unfreed_in(action)
            yield waiting - inputs + peak, messages.bytes, absent
        waiting += deltas((action,), costs)[0]
        messages.after(action)
        yield waiting, messages.bytes, absent


class _Messages:
    """The messages of a rank: received and not read yet, sent and not complete.

    gloo reports no completion, so the last `PENDING_SENDS` of a channel and kind count. On a GPU a
    send counts until the next one of the rank. Bytes that the stage has saved as well count once.
    """

    def __init__(self, rank: int, program: Program) -> None:
        self.rank, self.program = rank, program
        self.edges = edges_of(program.lowered, rank)
        self.device = torch.device(program.device_type)
        self.waiting: dict[Message, int] = {}
        self.sent: dict[Message, int] = {}
        self.pending: dict[tuple[int, str], list[Message]] = {}  # by peer and kind
        self.before_w: set[tuple[int, int]] = set()  # stage and microbatch of B without its W
        self.saved = {
            (stage, op, reader): _sent_and_saved(program.stages[stage], op, reader)
            for stage in program.stages_of(rank)
            for op, reader in ((F, BW), (F, W), (B, W))
        }
        self.unfreed = {
            (stage, op): _unfreed(program.stages[stage], op)
            for stage in program.stages_of(rank)
            for op in (B, BW)
        }

    @property
    def bytes(self) -> int:
        return sum(self.waiting.values()) + sum(self.sent.values())

    def unfreed_in(self, action: Action) -> int:
        """Returns the bytes at the peak of a pass that it would free if F's message had arrived."""
        is_sent = Message(F, action.stage + 1, action.microbatch) in self.sent
        return self.unfreed.get((action.stage, action.op), 0) if is_sent else 0

    def before(self, action: Action) -> None:
        """Counts what is sent or received; what arrived for a pass counts as its activation."""
        edge, stage = self.edges[action], self.program.stages[action.stage]
        if action.op in RECEIVES and edge.carries is not None:
            received = received_specs(stage, self.program.random_until, self.device)
            self.waiting[edge.carries] = sum(
                spec.bytes for spec in received[MESSAGE_OPS[action.op]]
            )
        elif action.op in SENDS and edge.carries is not None:
            self._send(action, edge.carries, edge.peer)
        for message in edge.needs:
            self.waiting.pop(message, None)

    def after(self, action: Action) -> None:
        """Counts the tensors that wait for a stage on this rank, or for a send to end."""
        stage = self.program.stages[action.stage]
        for message, peer in self.edges[action].makes:
            if peer == self.rank and message.kind in DIRECTION:
                reader = BW if message.kind == F else W
                saved = self.saved[action.stage, message.kind, reader] * (action.op != BW)
                self.waiting[message] = stage.message_bytes(message.kind) - saved
        number = action.stage, action.microbatch
        forward = Message(F, action.stage + 1, action.microbatch)
        backward = Message(B, action.stage - 1, action.microbatch)
        if action.op == B:
            self.before_w.add(number)
            self._count(forward, action.stage, F, W)
        elif action.op in (BW, W):
            self.before_w.discard(number)
            self._count(forward, action.stage, F)
            self._count(backward, action.stage, B)

    def _send(self, action: Action, message: Message, peer: int) -> None:
        pending = self.pending.setdefault((peer, message.kind), [])
        if self.device.type != "cpu":
            self.sent.clear()
        elif len(pending) == PENDING_SENDS:
            self.sent.pop(pending.pop(0), None)
        pending.append(message)
        self.sent[message] = 0
        is_split = (action.stage, action.microbatch) in self.before_w
        reader = BW if message.kind == F else W if is_split else None
        self._count(message, action.stage, message.kind, reader)

    def _count(self, message: Message, stage: int, op: str, reader: str | None = None) -> None:
        """Counts a message, if it is under way, without what `reader` of its stage saves too."""
        if message in self.sent:
            saved = self.saved[stage, op, reader] if reader is not None else 0
            self.sent[message] = self.program.stages[stage].message_bytes(op) - saved


def _unfreed(stage: StageProgram, op: str) -> int:
    """Returns by how many bytes the peak of a backward pass is higher while what F sends and saves
    is being sent."""
    slots = {slot for slot, _ in _sent_and_read(stage, F, op)}
    return transient_bytes(stage, op, slots) - transient_bytes(stage, op) if slots else 0


def _sent_and_saved(stage: StageProgram, op: str, reader: str) -> int:
    """Returns the bytes of tensors that `op` of a stage sends and that `reader` reads as well."""
    tensors = (tensor for _, tensor in _sent_and_read(stage, op, reader))
    return storage_bytes(tensors)


def _sent_and_read(
    stage: StageProgram, op: str, reader: str
) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Yields the saved values of `op`, with their slots, that `reader` reads and that share a
    storage with what `op` sends."""
    if not {op, reader} <= stage.pieces.keys():
        return
    piece, read = stage.pieces[op], set(stage.pieces[reader].inputs)
    names = stage.sends if op == F else stage.gradients_out
    role = ACTIVATION if op == F else GRADIENT
    values = [*zip(piece.outputs, output_values(piece.module.graph), strict=True)]
    sent = storages_behind(
        node for slot, node in values if slot.role == role and slot.name in names
    )
    for slot, node in values:
        if slot.role == SAVED and slot in read:
            for tensor in tensors_of(node):
                if storage_key(tensor) in sent:
                    yield slot, tensor
