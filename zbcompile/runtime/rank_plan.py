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
from zbcompile.distributed.packing import HIDDEN_MESSAGE, ROWS_MESSAGE, Buffer, Message
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.program.program import Program
from zbcompile.runtime.overlapped_pairs import make_pairs
from zbcompile.runtime.stage_plan import AFTER, Arrival, CompiledStage, arrivals_of
from zbcompile.schedules.ir.actions import COMPUTE, MESSAGES, ONCE, RECEIVES, SENDS, Action, B, F, Pair, Step, flatten
from zbcompile.schedules.ir.dependencies import RECEIVE_OF, SEND_OF, awaited, source, target, travels_as
from zbcompile.schedules.ir.kinds import KINDS


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
    """The instructions of a rank; a pair is two, and the send of what its first makes. `merged` runs its pairs."""

    rank: int
    instructions: tuple[tuple[Instruction, ...], ...]
    merged: Mapping[tuple[Action, Action], Run]

    def with_updates(self, order: Iterable[Step]) -> "RankPlan":
        """The plan with the optimizer's actions where `order`, which has all others as well, has them."""
        own = {step[0].action: step for step in self.instructions}
        actions = [flatten((step,))[0] for step in order]
        steps = [(Instruction(a),) if a.op in ONCE else own[a] for a in actions if a.op in ONCE or a in own]
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


def plan_rank(program: Program, rank: int, stages: Stages, variants: Sequence[Stages] = ()) -> RankPlan:
    """Plan the actions of `rank`, whose compiled stages are among `stages`; `variants` has others per microbatch."""
    steps = [step if isinstance(step, Pair) else (step,) for step in program.lowered.programs[rank]]

    def stage_of(action: Action) -> CompiledStage:
        return (variants[action.microbatch] if variants else stages)[action.stage]

    buffers = assign_buffers(program, rank, stage_of)
    completes = completed_sends(program, rank, buffers)
    collectives = awaited(program.schedule, lowered=True) if program.vocabulary is not None else {}

    def instruction(action: Action) -> Instruction:
        needs, makes = needed_by(program, action), made_by(program, action)
        if program.vocabulary is not None and action.op not in MESSAGES:
            if (collective := collectives.get(action[:2])) is not None:
                needs = Message(collective, action.stage, action.microbatch)
            makes = makes or _handed_over(program, action)
            if makes is not None and makes.kind in (HIDDEN_MESSAGE, ROWS_MESSAGE):
                return Instruction(action, needs, makes, local=True, completes=completes.get(action, ()))
        if action.op in RECEIVES and needs is not None:
            peer = program.rank_of(_source(program, needs), action.microbatch)
            return Instruction(action, carries=needs, peer=peer, buffers=buffers[action])
        peer = program.rank_of(makes.stage, action.microbatch) if makes else -1
        if action.op in SENDS:
            return Instruction(action, carries=makes, peer=peer)
        return Instruction(action, needs, makes, peer == rank, peer=peer, completes=completes.get(action, ()))

    pairs = make_pairs(steps, stage_of)
    return RankPlan(rank, tuple(tuple(map(instruction, step)) for step in _send_within_pairs(steps)), pairs)


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


def needed_by(program: Program, action: Action) -> Message | None:
    """The message that must arrive before a compute action runs, or that a RECV posts."""
    op, stage, microbatch = action
    needs = source(op, stage, program.schedule.stages) is not None
    return Message(travels_as(op), stage, microbatch) if needs else None


def _handed_over(program: Program, action: Action) -> Message | None:
    """The message with which the last stage's forward, or the first one's backward, serves the vocabulary shards."""
    op, stage, microbatch = action
    if op == F and stage == program.schedule.stages - 1:
        return Message(HIDDEN_MESSAGE, stage, microbatch)
    if KINDS[op].event == B and stage == 0 and program.schedule.lookups:
        return Message(ROWS_MESSAGE, stage, microbatch)
    return None


def made_by(program: Program, action: Action) -> Message | None:
    """The message that a compute action makes for another stage, or that a SEND sends."""
    op, stage, microbatch = action
    there = target(op, stage, program.schedule.stages)
    return None if there is None else Message(travels_as(op), there, microbatch)


def _source(program: Program, message: Message) -> int:
    """The stage that sends a message."""
    found = source(message.kind, message.stage, program.schedule.stages)
    assert found is not None
    return found


def assign_buffers(
    program: Program, rank: int, stage_of: Callable[[Action], Receiver]
) -> dict[Action, tuple[Buffer, ...]]:
    """A buffer for every tensor of every receive; each comes back after its last reader, in the order of actions."""
    arrivals: dict[int, dict[str, tuple[Arrival, ...]]] = {}  # by what runs, of which there is little
    free: dict[TensorSpec, list[int]] = defaultdict(list)
    made: dict[TensorSpec, int] = defaultdict(int)
    live: dict[tuple[int, int], list[tuple[Buffer, frozenset[str]]]] = defaultdict(list)
    assigned: dict[Action, tuple[Buffer, ...]] = {}
    for action in flatten(program.lowered.programs[rank]):
        waiting = live[action.stage, action.microbatch]
        if action.op in RECEIVES:
            stage = stage_of(action)
            if id(stage) not in arrivals:
                arrivals[id(stage)] = _with_generator(stage)
            found = arrivals[id(stage)][travels_as(action.op)]
            assigned[action] = tuple(_take_buffer(arrival, free, made) for arrival in found)
            waiting += [(b, a.readers) for b, a in zip(assigned[action], found, strict=True) if b.number >= 0]
        elif action.op in AFTER:
            done = [held for held in waiting if held[1].isdisjoint(AFTER[action.op])]
            for buffer, _ in done:
                free[buffer.spec].append(buffer.number)
            live[action.stage, action.microbatch] = [held for held in waiting if held not in done]
    return assigned


def _take_buffer(arrival: Arrival, free: dict[TensorSpec, list[int]], made: dict[TensorSpec, int]) -> Buffer:
    spec = TensorSpec(*arrival.spec[:4])  # whether a gradient comes back does not change the memory
    if arrival.escapes:
        return Buffer(spec, -1)
    if not free[spec]:
        made[spec] += 1
        return Buffer(spec, made[spec] - 1)
    return Buffer(spec, free[spec].pop())


def _with_generator(stage: Receiver) -> dict[str, tuple[Arrival, ...]]:
    """What arrives at a stage; generator state comes last and is used up by F."""
    arrivals = arrivals_of(stage.program)
    if not stage.generator_arrives:
        return arrivals
    state = Arrival(generator_spec(stage), frozenset("F"), escapes=False)
    return {**arrivals, "F": (*arrivals["F"], state)}


def generator_spec(stage: Receiver) -> TensorSpec:
    """The shape of the generator state that travels with activations."""
    size = 16 if stage.device.type == "cuda" else torch.get_rng_state().numel()
    return TensorSpec((size,), (1,), "uint8", str(stage.device))


def completed_sends(
    program: Program, rank: int, buffers: Mapping[Action, Sequence[Buffer]]
) -> dict[Action, tuple[Message, ...]]:
    """For every action that needs a message: the sends known to be over once that message has arrived."""
    peers: dict[int, Mapping[Action, int]] = {}
    open_sends: dict[int, list[tuple[int, Message]]] = defaultdict(list)  # by receiver: where it has used the message
    completes: dict[Action, tuple[Message, ...]] = {}
    for action in flatten(program.lowered.programs[rank]):
        if action.op in SENDS:
            message = made_by(program, action)
            assert message is not None
            peer = program.rank_of(message.stage, message.microbatch)
            open_sends[peer].append((_used(_positions(program, peer, peers), message), message))
        elif buffers.get(Action(RECEIVE_OF.get(KINDS[action.op].event, ""), action.stage, action.microbatch)):
            needs = needed_by(program, action)
            assert needs is not None
            sender = _source(program, needs)
            peer = program.rank_of(sender, needs.microbatch)
            sent = Action(SEND_OF[needs.kind], sender, needs.microbatch)
            at = _positions(program, peer, peers).get(sent, -1)
            completes[action] = tuple(message for used, message in open_sends[peer] if used < at)
            open_sends[peer] = [send for send in open_sends[peer] if send[0] >= at]
    return completes


def _positions(program: Program, peer: int, known: dict[int, Mapping[Action, int]]) -> Mapping[Action, int]:
    """The position of each action in the program of a peer; cached, as a rank has few peers."""
    if peer not in known:
        known[peer] = {action: at for at, action in enumerate(flatten(program.lowered.programs[peer]))}
    return known[peer]


def _used(positions: Mapping[Action, int], message: Message) -> int:
    kind, stage, microbatch = message
    users = (Action(op, stage, microbatch) for op in COMPUTE if KINDS[op].event == kind)
    return next(positions[user] for user in users if user in positions)
