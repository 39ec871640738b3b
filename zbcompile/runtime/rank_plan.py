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
from zbcompile.schedules.ir.actions import EXCHANGES, ONCE, RECEIVES, SENDS, Action, Pair, Step, flatten
from zbcompile.schedules.ir.dependencies import SEND_OF, travels_as
from zbcompile.schedules.ir.schedule import Lowered
from zbcompile.schedules.lowering.edges import Message, edges_of


class Instruction(NamedTuple):
    """An action with its messages.

    A compute action runs once `needs` has arrived, which tells that the sends in `completes` are over, and `makes` a
    message, `local` if for a stage on this rank, else for one on `peer`. A SEND sends `carries` to `peer`; a RECV posts
    it, into `buffers`.
    """

    action: Action
    needs: Message | None = None
    makes: Message | None = None
    local: bool = False
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
        local, posted, over = peer == rank, buffers.get(action, ()), completes.get(action, ())
        return Instruction(action, needs, makes, local, carries, peer, posted, over)

    return tuple(tuple(map(instruction, step)) for step in _send_within_pairs(_steps(program, rank)))


def _steps(program: Program, rank: int) -> list[Sequence[Action]]:
    return [step if isinstance(step, Pair) else (step,) for step in program.lowered.programs[rank]]


def _send_within_pairs(steps: Sequence[Sequence[Action]]) -> list[tuple[Action, ...]]:
    """What the first of a pair made is sent in the middle of the pair: its SEND becomes the pair's third part."""
    placed = {action for step in steps for action in step}
    early = {Action(SEND_OF[step[0].op], *step[0][1:]) for step in steps if len(step) == 2} & placed
    result = []
    for step in steps:
        send = Action(SEND_OF.get(step[0].op, ""), *step[0][1:])
        if step[0] not in early:
            result.append((*step, send) if len(step) == 2 and send in early else tuple(step))
    return result


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
            found = arrivals[id(stage)][travels_as(action.op)]
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
    received: dict[Message | None, int] = {}  # from another rank
    completes: dict[Action, tuple[Message, ...]] = {}
    for action, edge in edges_of(program.lowered, rank).items():
        if edge.carries is not None and edge.peer not in places:
            places[edge.peer] = _places(program.lowered, edge.peer)
        if edge.carries is not None and action.op in SENDS:
            open_sends[edge.peer].append((places[edge.peer].used[edge.carries], edge.carries))
        elif buffers.get(action):
            received[edge.carries] = edge.peer
        elif edge.needs in received:
            peer = received[edge.needs]
            at = places[peer].sent.get(edge.needs, -1)
            completes[action] = tuple(message for used, message in open_sends[peer] if used < at)
            open_sends[peer] = [send for send in open_sends[peer] if send[0] >= at]
    return completes


class _Places(NamedTuple):
    """Where in the order of a rank each message is used, and where it is sent."""

    used: Mapping[Message | None, int]
    sent: Mapping[Message | None, int]


def _places(lowered: Lowered, rank: int) -> _Places:
    edges = list(enumerate(edges_of(lowered, rank).items()))
    sent = {edge.carries: at for at, (action, edge) in edges if action.op in SENDS}
    return _Places({edge.needs: at for at, (_, edge) in edges}, sent)
