"""One rank's program made ready to run: every action with its handler, its messages and the buffers it receives into.

Two things are decided here once, from the order of the actions alone:

* which receive buffer each message gets. A buffer is taken when its receive is posted and given back after the last
  pass that reads what arrived, so there are as many as ever live at once, not one per microbatch, for all steps;
* when each send is known to be complete: as soon as something arrives that its receiver sent after using it. gloo
reports the end of a send only to a wait; once the send is known to be over, that wait is free and frees the memory.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from zbcompile.backends.types import Run
from zbcompile.distributed.packing import Buffer
from zbcompile.passes import gpu
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.program.program import Program
from zbcompile.runtime.data_parallel import Sum, SumPlan, plan_sums
from zbcompile.runtime.overlapped_pairs import make_pairs
from zbcompile.runtime.stage_plan import AFTER, ArrivalUses, CompiledStage, arrivals_of
from zbcompile.schedules.ir.actions import EXCHANGES, ONCE, RECEIVES, SENDS, Action, F, Pair, Step, flatten
from zbcompile.schedules.ir.kinds import KINDS
from zbcompile.schedules.ir.schedule import Lowered
from zbcompile.schedules.lowering.edges import Message, edges_of


class MadeMessage(NamedTuple):
    """A message that a pass makes, `local` if for a stage on this rank, of `values` of its results (None: all)."""

    message: Message
    local: bool
    values: slice | None = None


class Instruction(NamedTuple):
    """An action with its messages.

    A compute action runs once `needs` have arrived, which tells that the sends in `completes` are over, and `makes`
    messages. A SEND sends `carries` to `peer`; a RECV posts it, into `buffers`.
    """

    action: Action
    needs: tuple[Message, ...] = ()
    makes: tuple[MadeMessage, ...] = ()
    carries: Message | None = None
    peer: int = -1
    buffers: tuple[Buffer, ...] = ()
    completes: tuple[Message, ...] = ()


@dataclass(frozen=True)
class RankPlan:
    """The instructions of a rank; a pair is two, and the send of what its first makes. `merged` runs its pairs,
    `stages` are those that it has, and `sums` says which of their gradients are summed over other ranks, and when."""

    rank: int
    instructions: tuple[tuple[Instruction, ...], ...]
    merged: Mapping[tuple[Action, Action], Run]
    stages: tuple[int, ...]
    sums: SumPlan

    def with_updates(self, order: Iterable[Step]) -> "RankPlan":
        """The plan with the actions that a step has once where `order`, which has all others as well, has them."""
        own = {step[0].action: step for step in self.instructions}
        actions = [flatten((step,))[0] for step in order]
        once = ONCE.union(EXCHANGES)
        steps = [(Instruction(a),) if a.op in once else own[a] for a in actions if a.op in once or a in own]
        return replace(self, instructions=tuple(steps))

    @property
    def buffers(self) -> dict[TensorSpec, int]:
        """How many receive buffers there are of each shape."""
        counts: dict[TensorSpec, int] = {}
        for instruction in (i for step in self.instructions for i in step):
            for spec, number in instruction.buffers:
                counts[spec] = max(counts.get(spec, 0), number + 1)
        return counts


class Receiver(Protocol):
    """What receive buffers depend on: a `CompiledStage`, or less."""

    @property
    def program(self) -> StageProgram: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def generator_arrives(self) -> bool: ...


Stages = Mapping[int, CompiledStage]


def plan_rank(program: Program, rank: int, graphs: Sequence[Stages], sums: Mapping[str, Sum]) -> RankPlan:
    """The plan of `rank`; `graphs[i]` are the compiled stages of this process as microbatch i runs them, `sums` says
    over whom gradients are summed."""

    def stage_of(action: Action) -> CompiledStage:
        return graphs[action.microbatch][action.stage]

    pairs = make_pairs(_steps(program, rank), stage_of)
    instructions, sum_plan = instructions_of(program, rank, stage_of), plan_sums(program, rank, sums)
    return RankPlan(rank, instructions, pairs, program.stages_of(rank), sum_plan)


def instructions_of(
    program: Program, rank: int, stage_of: Callable[[Action], Receiver]
) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of `rank`, as a `RankPlan` has them."""
    edges = edges_of(program.lowered, rank)
    buffers = assign_buffers(program, rank, stage_of)
    completes = completed_sends(program, rank, buffers)

    def instruction(action: Action) -> Instruction:
        needs, makes, carries, peer = edges[action]
        parcels = _parcels(stage_of(action).program, makes, rank) if makes else ()
        return Instruction(action, needs, parcels, carries, peer, buffers.get(action, ()), completes.get(action, ()))

    return tuple(tuple(map(instruction, step)) for step in _send_within_pairs(_steps(program, rank)))


def _parcels(stage: StageProgram, makes: Sequence[tuple[Message, int]], rank: int) -> tuple[MadeMessage, ...]:
    """What a pass makes for other stages, of which the next one gets what is left."""
    if len(makes) == 1:
        return tuple(MadeMessage(message, peer == rank) for message, peer in makes)
    found, begin = [], 0
    for message, peer in makes:
        leaving = stage.sends if message.kind == F else stage.gradients_out
        end = begin + sum(spec.hops == message.hops for spec in leaving.values())
        found.append(MadeMessage(message, peer == rank, slice(begin, None if message.hops == 1 else end)))
        begin = end
    return tuple(found)


def _steps(program: Program, rank: int) -> list[Sequence[Action]]:
    return [step if isinstance(step, Pair) else (step,) for step in program.lowered.programs[rank]]


def _send_within_pairs(steps: Sequence[Sequence[Action]]) -> list[tuple[Action, ...]]:
    """What the first of a pair made is sent in the middle of the pair: its SENDs become further parts of the pair."""
    placed = [step[0] for step in steps if step[0].op in SENDS]
    sends: dict[tuple[str, int, int], list[Action]] = defaultdict(list)
    for send in placed:
        sends[KINDS[send.op].takes, *send[1:]].append(send)
    within = [sends.get((KINDS[step[0].op].event, *step[0][1:]), []) if len(step) == 2 else [] for step in steps]
    early = {send for each in within for send in each}
    return [(*step, *own) for step, own in zip(steps, within, strict=True) if step[0] not in early]


def assign_buffers(
    program: Program, rank: int, stage_of: Callable[[Action], Receiver]
) -> dict[Action, tuple[Buffer, ...]]:
    """A buffer for every tensor of every receive; each comes back after its last reader, in the order of actions."""
    arrivals: dict[int, dict[str, tuple[ArrivalUses, ...]]] = {}  # by what runs, of which there is little
    free: dict[TensorSpec, list[int]] = defaultdict(list)
    made: dict[TensorSpec, int] = defaultdict(int)
    live: dict[tuple[int, int], list[tuple[Buffer, frozenset[str]]]] = defaultdict(list)
    assigned: dict[Action, tuple[Buffer, ...]] = {}
    for action in flatten(program.lowered.programs[rank]):
        waiting = live[action.stage, action.microbatch]
        if action.op in RECEIVES:
            stage = stage_of(action)
            if id(stage) not in arrivals:
                arrivals[id(stage)] = arrivals_at(stage)
            kind = KINDS[action.op]
            found = [each for each in arrivals[id(stage)][kind.takes] if each.spec.hops == kind.hops]
            assigned[action] = tuple(_take_buffer(arrival, free, made) for arrival in found)
            waiting += [(b, a.readers) for b, a in zip(assigned[action], found, strict=True) if b.number >= 0]
        elif action.op in AFTER:
            done = [held for held in waiting if held[1].isdisjoint(AFTER[action.op])]
            for buffer, _ in done:
                free[buffer.spec].append(buffer.number)
            live[action.stage, action.microbatch] = [held for held in waiting if held not in done]
    return assigned


def _take_buffer(arrival: ArrivalUses, free: dict[TensorSpec, list[int]], made: dict[TensorSpec, int]) -> Buffer:
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
    state = ArrivalUses(TensorSpec((size,), (1,), "uint8", str(stage.device)), frozenset("F"), escapes=False)
    return {**arrivals, "F": (*arrivals["F"], state)}


def completed_sends(
    program: Program, rank: int, buffers: Mapping[Action, Sequence[Buffer]]
) -> dict[Action, tuple[Message, ...]]:
    """For every action that needs a message: the sends known to be over once that message has arrived."""
    places: dict[int, _Places] = {}  # a rank has few peers
    open_sends: dict[int, list[tuple[int, Message]]] = defaultdict(list)  # by receiver: where it has used the message
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
                over = (message for used, message in open_sends[peer] if used < at)
                completes[action] = (*completes.get(action, ()), *over)
                open_sends[peer] = [send for send in open_sends[peer] if send[0] >= at]
    return completes


class _Places(NamedTuple):
    """Where in the order of a rank each message is used, and where it is sent."""

    used: Mapping[Message, int]
    sent: Mapping[Message, int]


def _places(lowered: Lowered, rank: int) -> _Places:
    edges = list(enumerate(edges_of(lowered, rank).items()))
    sent = {edge.carries: at for at, (action, edge) in edges if action.op in SENDS and edge.carries is not None}
    return _Places({need: at for at, (_, edge) in edges for need in edge.needs}, sent)
