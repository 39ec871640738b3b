"""The receive buffers of a rank, and when its sends are over, decided from the order of its actions
alone.

* A buffer is taken when its receive is posted and given back after the last pass that reads what
  arrived, so there are as many as ever live at once, not one per microbatch, for all steps.
* A send is known to be complete as soon as something arrives that its receiver sent after using it.
  gloo reports the end of a send only to a wait; once the send is known to be over, that wait is
  free and frees the memory.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from zbcompile.distributed.packing import Buffer
from zbcompile.passes import gpu
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Slot, TensorSpec
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_private import storage_key
from zbcompile.program.program import Program
from zbcompile.schedules.ir.actions import RECEIVES, SENDS, Action, flatten
from zbcompile.schedules.ir.kinds import MESSAGE_OPS
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.schedules.lowering.edges import Message, edges_of

AFTER = {"F": ("B", "W", "BW"), "B": ("W",), "W": (), "BW": ()}  # the passes that may follow each


class Receiver(Protocol):
    """What receive buffers depend on: a `CompiledStage`, or less."""

    @property
    def program(self) -> StageProgram: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def generator_arrives(self) -> bool: ...


@dataclass(frozen=True)
class ArrivalUses:
    """The uses of a tensor that arrives: the passes that read it, or a view of it; `escapes` if it
    is passed on."""

    spec: TensorSpec
    readers: frozenset[str]
    escapes: bool


def arrivals_of(program: StageProgram) -> dict[str, tuple[ArrivalUses, ...]]:
    """What arrives in `F` and in `B`, in the order in which it travels.

    A graph may keep what arrived, or a view of it, for a later pass, or pass it on (a skip
    connection): its memory is free only when the last of these has read it.
    """
    forward = tuple(
        _arrival(program, Slot("activation", name), spec) for name, spec in program.receives.items()
    )
    backward = tuple(
        _arrival(program, Slot("tangent", name), spec)
        for name, spec in program.gradients_in.items()
    )
    return {"F": forward, "B": backward}


def _arrival(program: StageProgram, slot: Slot, spec: TensorSpec) -> ArrivalUses:
    aliases, escapes = {slot}, False
    pieces = {name: program.pieces[name] for name in AFTER if name in program.pieces}
    for piece in pieces.values():
        nodes = [
            node
            for node in piece.module.graph.find_nodes(op="placeholder")
            if node.meta["slot"] in aliases
        ]
        keys = {
            storage_key(node.meta["val"])
            for node in nodes
            if isinstance(node.meta.get("val"), torch.Tensor)
        }
        results = zip(piece.outputs, output_values(piece.module.graph), strict=True)
        same = [result for result, node in results if storage_key(node.meta["val"]) in keys]
        aliases |= {result for result in same if result.kind == "saved"}
        escapes |= any(result.kind != "saved" for result in same)
    return ArrivalUses(
        spec, frozenset(name for name in pieces if aliases & set(pieces[name].inputs)), escapes
    )


def assign_buffers(
    program: Program, rank: int, stage_of: Callable[[Action], Receiver]
) -> dict[Action, tuple[Buffer, ...]]:
    """A buffer for every tensor of every receive; each comes back after its last reader, in the
    order of actions."""
    arrivals: dict[
        int, dict[str, tuple[ArrivalUses, ...]]
    ] = {}  # by what runs, of which there is little
    free: dict[TensorSpec, list[int]] = defaultdict(list)
    made: dict[TensorSpec, int] = defaultdict(int)
    live: dict[tuple[int, int], list[tuple[Buffer, frozenset[str]]]] = defaultdict(list)
    assigned: dict[Action, tuple[Buffer, ...]] = {}
    for action in flatten(program.lowered.orders[rank]):
        waiting = live[action.stage, action.microbatch]
        if action.op in RECEIVES:
            stage = stage_of(action)
            if id(stage) not in arrivals:
                arrivals[id(stage)] = arrivals_at(stage)
            found = arrivals[id(stage)][MESSAGE_OPS[action.op]]
            assigned[action] = tuple(_take_buffer(arrival, free, made) for arrival in found)
            waiting += [
                (b, a.readers)
                for b, a in zip(assigned[action], found, strict=True)
                if b.number >= 0
            ]
        elif action.op in AFTER:
            done = [held for held in waiting if held[1].isdisjoint(AFTER[action.op])]
            for buffer, _ in done:
                free[buffer.spec].append(buffer.number)
            live[action.stage, action.microbatch] = [held for held in waiting if held not in done]
    return assigned


def _take_buffer(
    arrival: ArrivalUses, free: dict[TensorSpec, list[int]], made: dict[TensorSpec, int]
) -> Buffer:
    spec = TensorSpec(*arrival.spec[:4])  # whether a gradient comes back does not change the memory
    if arrival.escapes:
        return Buffer(spec, -1)
    if not free[spec]:
        made[spec] += 1
        return Buffer(spec, made[spec] - 1)
    return Buffer(spec, free[spec].pop())


def arrivals_at(stage: Receiver) -> dict[str, tuple[ArrivalUses, ...]]:
    """What arrives at a stage; generator state comes last and is used up by F."""
    arrivals = arrivals_of(stage.program)
    if not stage.generator_arrives:
        return arrivals
    size = gpu.generator_state(stage.device).numel()
    state = ArrivalUses(
        TensorSpec((size,), (1,), "uint8", str(stage.device)), frozenset("F"), escapes=False
    )
    return {**arrivals, "F": (*arrivals["F"], state)}


def completed_sends(
    program: Program, rank: int, buffers: Mapping[Action, Sequence[Buffer]]
) -> dict[Action, tuple[Message, ...]]:
    """For every action that needs a message: the sends known to be over once that message has
    arrived. They are those that its sender has used before."""
    places: dict[int, _Places] = {}  # a rank has few peers
    open_sends: dict[int, list[tuple[int, Message]]] = defaultdict(
        list
    )  # by receiver: where it has used the message
    received: dict[Message, int] = {}  # from another rank
    completes: dict[Action, tuple[Message, ...]] = {}
    for action, edge in edges_of(program.lowered, rank).items():
        if edge.carries is not None and edge.peer not in places:
            places[edge.peer] = _places(program.lowered, edge.peer)
        if edge.carries is not None and action.op in SENDS:
            open_sends[edge.peer].append((places[edge.peer].used[edge.carries], edge.carries))
        elif edge.carries is not None and buffers.get(action):
            received[edge.carries] = edge.peer
        for need in edge.needs:
            if need in received:
                peer = received[need]
                at = places[peer].sent.get(need, -1)
                over = [send for send in open_sends[peer] if send[0] < at]
                completes[action] = (*completes.get(action, ()), *(message for _, message in over))
                open_sends[peer] = [send for send in open_sends[peer] if send[0] >= at]
    return completes


class _Places(NamedTuple):
    """Where in the order of a rank each message is used, and where it is sent."""

    used: Mapping[Message, int]
    sent: Mapping[Message, int]


def _places(lowered: Schedule, rank: int) -> _Places:
    edges = list(enumerate(edges_of(lowered, rank).items()))
    sent = {
        edge.carries: at
        for at, (action, edge) in edges
        if action.op in SENDS and edge.carries is not None
    }
    return _Places({need: at for at, (_, edge) in edges for need in edge.needs}, sent)
