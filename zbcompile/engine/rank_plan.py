"""One rank's program made ready to run: every action with its messages and the buffers it receives
into."""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zbcompile.backends.types import Run
from zbcompile.distributed.packing import Buffer
from zbcompile.engine.replicas import Sum, SumPlan, plan_sums
from zbcompile.engine.stage_plan import CompiledStage
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.stage.overlap import merge
from zbcompile.passes.torch_private import boxed
from zbcompile.program.program import Program
from zbcompile.program.receive_buffers import assign_buffers, completed_sends
from zbcompile.schedules.ir.actions import EXCHANGES, ONCE, SENDS, Action, Pair, Step, flatten
from zbcompile.schedules.ir.kinds import MESSAGE_OPS, result_of
from zbcompile.schedules.lowering.edges import Message, edges_of


class MadeMessage(NamedTuple):
    """A message that a pass makes, `local` if for a stage on this rank."""

    message: Message
    local: bool


class Instruction(NamedTuple):
    """An action with its messages.

    A compute action runs once the messages in `needs` have arrived; their arrival proves that the
    sends in `completes` are over. It `makes` messages. A SEND sends the message `carries` to
    `peer`, a RECV posts it, into `buffers`. An `exchange` happens once all ranks have come to it.
    """

    action: Action
    needs: tuple[Message, ...] = ()
    makes: tuple[MadeMessage, ...] = ()
    carries: Message | None = None
    peer: int = -1
    buffers: tuple[Buffer, ...] = ()
    completes: tuple[Message, ...] = ()
    exchange: bool = False


@dataclass(frozen=True)
class RankPlan:
    """The steps of a rank, each of one instruction. A pair that runs as one graph is a step of both
    its instructions and the SENDs of what the first makes; `merged` has its graph. `stages` are
    those of the rank, and `sums` says which of their gradients are summed over other ranks, and
    when."""

    rank: int
    instructions: tuple[tuple[Instruction, ...], ...]
    merged: Mapping[Sequence[Action], Run]
    stages: tuple[int, ...]
    sums: SumPlan

    def joined_with(self, order: Sequence[Step]) -> "RankPlan":
        """The plan with the actions that a step has once, placed as in `order`, which has all other
        actions too."""
        own, placed = iter(self.instructions), set[Action]()
        steps: list[tuple[Instruction, ...]] = []
        for action in flatten(order):
            if action.op in ONCE or action.op in EXCHANGES:
                steps.append((Instruction(action, exchange=action.op in EXCHANGES),))
                placed.add(action)
            while action not in placed:
                steps.append(next(own))
                placed.update(each.action for each in steps[-1])
        return replace(self, instructions=tuple(steps))

    @property
    def buffers(self) -> dict[TensorSpec, int]:
        """How many receive buffers there are of each shape."""
        counts: dict[TensorSpec, int] = {}
        for instruction in (i for step in self.instructions for i in step):
            for spec, number in instruction.buffers:
                counts[spec] = max(counts.get(spec, 0), number + 1)
        return counts


Stages = Mapping[int, CompiledStage]


def plan_rank(
    program: Program, rank: int, graphs: Sequence[Stages], sums: Mapping[str, Sum]
) -> RankPlan:
    """The plan of `rank`; `graphs[i]` are the compiled stages of this process as microbatch i runs
    them, `sums` says over whom gradients are summed."""

    def stage_of(action: Action) -> CompiledStage:
        return graphs[action.microbatch][action.stage]

    merged = run_together(_steps(program, rank), stage_of)
    edges = edges_of(program.lowered, rank)
    buffers = assign_buffers(program, rank, stage_of)
    completes = completed_sends(program, rank, buffers)

    def instruction(action: Action) -> Instruction:
        needs, makes, carries, peer = edges[action]
        parcels = tuple(MadeMessage(message, to == rank) for message, to in makes)
        return Instruction(
            action,
            needs,
            parcels,
            carries,
            peer,
            buffers.get(action, ()),
            completes.get(action, ()),
        )

    steps = _send_within_pairs(_steps(program, rank), merged)
    instructions = tuple(tuple(map(instruction, step)) for step in steps)
    return RankPlan(
        rank, instructions, merged, program.stages_of(rank), plan_sums(program, rank, sums)
    )


def _steps(program: Program, rank: int) -> list[Sequence[Action]]:
    return [step if isinstance(step, Pair) else (step,) for step in program.lowered.orders[rank]]


def _send_within_pairs(
    steps: Sequence[Sequence[Action]], merged: Container[Sequence[Action]]
) -> Iterator[tuple[Action, ...]]:
    """The steps, in which what the first of a pair makes is sent in the middle of the pair. In a
    pair in `merged` these SENDs become further parts; any other pair becomes steps of its own, with
    the SENDs between its two actions.
    """
    placed = [step[0] for step in steps if step[0].op in SENDS]
    sends: dict[tuple[str, int, int], list[Action]] = defaultdict(list)
    for send in placed:
        sends[MESSAGE_OPS[send.op], *send[1:]].append(send)
    within = [
        sends.get((result_of(step[0].op), *step[0][1:]), []) if len(step) == 2 else []
        for step in steps
    ]
    early = {send for each in within for send in each}
    for step, own in zip(steps, within, strict=True):
        if step in merged:
            yield (*step, *own)
        elif step[0] not in early:
            yield from ((action,) for action in (step[0], *own, *step[1:]))


def run_together(
    steps: Sequence[Sequence[Action]], stage_of: Callable[[Action], CompiledStage]
) -> dict[Sequence[Action], Run]:
    """The graphs that run the pairs in the order of a rank; pairs whose halves run one after the
    other are left out.

    What runs takes one list: the first half's inputs, a function that takes its results, and one
    that returns the second half's inputs. It returns the second half's results.

    FX graphs are merged into one, in which collectives and messages of each half hide behind the
    other (`zbcompile.passes.stage.overlap`). Graphs that a backend has compiled can no longer be
    interleaved: such halves run one after the other, as any two passes.

    Merging is a pass like others and goes through the compiler's `PassManager`. Its results are
    kept with the stages of a program as they are bound to a process (`CompiledStage.pairs`), not in
    the program of all ranks, which was tried:

    * whom a pair joins is known only with the step. If microbatches of two shapes alternate, all 16
      pairs of 1f1b-overlap (4 ranks, 8 microbatches) join graphs of two programs; no program has
      them, and they would hide nothing;
    * whether a pair is one graph depends on what this process made of the graphs: a backend, a look
      for a NaN replaces what runs, and then nothing is merged;
    * a merged graph repeats its halves: the directory of a GPT with 16 blocks would hold 60 % more
      operations, to save 7 ms for each kind of pair.
    """
    pairs = [step for step in steps if isinstance(step, Pair)]
    found = {pair: _run_of(pair, stage_of(pair.first), stage_of(pair.second)) for pair in pairs}
    return {pair: run for pair, run in found.items() if run is not None}


def _run_of(pair: Pair, one: CompiledStage, other: CompiledStage) -> Run | None:
    """The same for all pairs of these passes; a rank with two model copies has at most four, unless
    its microbatches run different graphs."""
    known, kind = one.pairs.setdefault(other, {}), (pair.first.op, pair.second.op)
    if kind not in known:
        known[kind] = _make_run(*kind, one, other)
    return known[kind]


def _make_run(op: str, other_op: str, one: CompiledStage, other: CompiledStage) -> Run | None:
    if one.mergeable and other.mergeable:
        merged = merge(one.program.pieces[op], other.program.pieces[other_op])
        return boxed(merged.module).forward  # type: ignore[no-any-return]
    return None
