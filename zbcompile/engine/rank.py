"""The action loop: the instructions of a rank, and one handler for each kind of action."""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from zbcompile.backends.types import Run
from zbcompile.distributed.transport import Transport
from zbcompile.engine.stage import SHARD, CompiledStage, StageRun, Tensors
from zbcompile.engine.vocabulary import Collectives
from zbcompile.faults.rank_status import RankStatus
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.stage.overlap import merge
from zbcompile.passes.torch_private import boxed
from zbcompile.profiling.observation import ActionTimes
from zbcompile.program.edges import Edge, Message, edges_of
from zbcompile.schedules import Schedule
from zbcompile.schedules.ir.actions import COLLECTIVES, ONCE, RECEIVES, SENDS, Action, Pair
from zbcompile.schedules.ir.kinds import MESSAGE_OPS, result_of
from zbcompile.schedules.ir.schedule import TORCH_LETTERS, format_step

SHARDED = ("S", "T")  # passes of a rank's shard of the output layer


class Instruction(NamedTuple):
    """One action with its messages, and the tensors that a RECV receives."""

    action: Action
    edge: Edge
    specs: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True)
class RankProgram:
    """The steps of a rank, each of one instruction.

    A pair that runs as one graph is a step of both its instructions and the SENDs of what the
    first produces; `merged` has its graph.
    """

    rank: int
    steps: tuple[tuple[Instruction, ...], ...]
    merged: Mapping[Sequence[Action], Run]


def plan_rank(
    order: Schedule, rank: int, graphs: Sequence[Mapping[int, CompiledStage]]
) -> RankProgram:
    """Returns the instructions of `rank` in a lowered `order`; microbatch i runs the stages of
    `graphs[i]`."""

    def stage_of(action: Action) -> CompiledStage:
        return graphs[action.microbatch][action.stage]

    actions = [step if isinstance(step, Pair) else (step,) for step in order.orders[rank]]
    merged: dict[Sequence[Action], Run] = {}
    for step in actions:
        if (run := _merge(step, stage_of)) is not None:
            merged[step] = run
    edges = edges_of(order, rank)

    def instruction(action: Action) -> Instruction:
        is_receive = action.op in RECEIVES
        specs = stage_of(action).receives[MESSAGE_OPS[action.op]] if is_receive else ()
        return Instruction(action, edges[action], specs)

    steps = (tuple(map(instruction, step)) for step in _send_within_pairs(actions, merged))
    return RankProgram(rank, tuple(steps), merged)


def _send_within_pairs(
    steps: Sequence[Sequence[Action]], merged: Container[Sequence[Action]]
) -> Iterator[tuple[Action, ...]]:
    """Yields the steps with the results of the first half of a pair sent in the middle of the pair.

    In a pair in `merged` these SENDs become further parts. Any other pair becomes steps of one
    action each, with the SENDs between its two halves.
    """
    sends: dict[tuple[str, int, int], list[Action]] = defaultdict(list)
    for op, stage, microbatch in (step[0] for step in steps if step[0].op in SENDS):
        sends[MESSAGE_OPS[op], stage, microbatch].append(Action(op, stage, microbatch))
    within = [
        sends.get((result_of(step[0].op), *step[0][1:]), []) if len(step) == 2 else []
        for step in steps
    ]
    early = {send for actions in within for send in actions}
    for step, between in zip(steps, within, strict=True):
        if step in merged:
            yield (*step, *between)
        elif step[0] not in early:
            yield from ((action,) for action in (step[0], *between, *step[1:]))


def _merge(pair: Sequence[Action], stage_of: Callable[[Action], CompiledStage]) -> Run | None:
    """Returns one graph for the halves of a pair; None if they run one after the other.

    The graph takes one list: the first half's inputs, a function that takes its results, and one
    that returns the second half's inputs. It returns the second half's results. Collectives and
    messages of each half hide behind the other (`zbcompile.passes.stage.overlap`). Graphs that a
    backend has compiled can no longer be interleaved.

    Merged graphs are cached with the compiled stages, not with the program: which stages a pair
    joins depends on the shapes of its microbatches.
    """
    if len(pair) == 1:
        return None
    first, second = map(stage_of, pair)
    if not (first.mergeable and second.mergeable):
        return None
    runs, ops = first.pairs.setdefault(second, {}), (pair[0].op, pair[1].op)
    if ops not in runs:
        merged = merge(first.program.pieces[ops[0]], second.program.pieces[ops[1]])
        runs[ops] = boxed(merged.module).forward
    return runs[ops]


@dataclass
class RankRun:
    """One rank during one step.

    Attributes:
        runs: The stages of the rank. Its shards of an output layer are stages as well.
        position: Shows other threads how far the rank is.
        times: Records the times of the actions. None: no recording.
        hooks: What optimizers and the sums over replicas do for a stage, by the operation
            (REDUCE, OPT).
        labels: Whether actions are named for torch.profiler, as torch's pipelines do (`PP:0F3`).
        outbox: Results that are not sent yet.
    """

    program: RankProgram
    runs: Mapping[int, StageRun]
    transport: Transport
    position: RankStatus
    times: ActionTimes | None = None
    hooks: Mapping[str, Callable[[int], None]] = field(default_factory=dict)
    collectives: Collectives | None = None
    labels: bool = False
    outbox: dict[Message, Tensors] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.program.rank

    def run(self) -> Iterator[Action]:
        """Runs the rank. Yields an action for as long as its input has not arrived."""
        ready = self.transport.ready
        for step in self.program.steps:
            for instruction in step:
                for message in instruction.edge.needs:
                    while not ready(message):
                        yield instruction.action
            if step[0].edge.needs:
                self._wait(step[0])
            self._execute(step)

    def _execute(self, step: tuple[Instruction, ...]) -> None:
        action = self.position.action = step[0].action
        handler = HANDLERS[action.op] if len(step) == 1 else RankRun._pair
        if self.times is not None:
            self.times.begin(action, self.rank)
        if self.labels:
            names = (
                format_step(action, "torch") if action.op in TORCH_LETTERS else str(action)
                for action, *_ in step[:2]
            )
            with record_function("PP:" + "|".join(names)):
                handler(self, *step)
        else:
            handler(self, *step)
        if self.times is not None:
            self._record_end(step[:2][-1])

    def _record_end(self, instruction: Instruction) -> None:
        if self.times is not None:
            live_bytes = sum(stage.live_bytes() for stage in self.runs.values())
            self.times.end(instruction.action, self.rank, live_bytes)

    def _wait(self, instruction: Instruction) -> None:
        """Blocks until the messages of an action have arrived."""
        self.position.action, self.position.waits = instruction.action, True
        for message in instruction.edge.needs:
            self.transport.wait(message)
        self.position.waits = False

    def _pair(self, first: Instruction, second: Instruction, *sends: Instruction) -> None:
        """Runs both halves as one graph. In its middle the results of the first are sent, and the
        inputs of the second received."""
        op, stage, microbatch = first.action
        second_op, second_stage, second_microbatch = second.action
        run, second_run = self.runs[stage], self.runs[second_stage]
        call, second_call = run.call(op, microbatch), second_run.call(second_op, second_microbatch)

        def take(results: Tensors) -> None:
            self._deliver(first, run.end(call, microbatch, results))
            self._record_end(first)
            for send in sends:
                self._execute((send,))

        def give() -> Tensors:
            if second.edge.needs:
                self._wait(second)
            if self.times is not None:
                self.times.begin(second.action, self.rank)
            return second_run.begin(second_call, second_microbatch, self._receive(second))

        values: list[Any] = run.begin(call, microbatch, self._receive(first))
        results = self.program.merged[first.action, second.action]([*values, take, give])
        self._deliver(second, second_run.end(second_call, second_microbatch, results))

    def _compute(self, instruction: Instruction) -> None:
        op, stage, microbatch = instruction.action
        run = self.runs[SHARD if op in SHARDED else stage]
        self._deliver(instruction, run.run(op, microbatch, self._receive(instruction)))

    def _receive(self, instruction: Instruction) -> Tensors:
        messages = instruction.edge.needs
        if len(messages) == 1:
            return self.transport.take(messages[0])
        return [value for message in messages for value in self.transport.take(message)]

    def _deliver(self, instruction: Instruction, values: Tensors) -> None:
        for message, destination in instruction.edge.makes:
            if destination == self.rank:
                self.transport.deliver(message, values)
            else:
                self.outbox[message] = values

    def _send(self, instruction: Instruction) -> None:
        message, peer = instruction.edge.carries, instruction.edge.peer
        assert message is not None
        values = self.outbox.pop(message)
        if self.times is not None:
            self.times.sent[self.rank] += sum(value.nbytes for value in values)
        self.position.waits = True  # for an earlier send
        self.transport.send(message, values, peer)
        self.position.waits = False

    def _post_receive(self, instruction: Instruction) -> None:
        edge = instruction.edge
        assert edge.carries is not None
        self.transport.post(edge.carries, instruction.specs, edge.peer)

    def _post_collective(self, instruction: Instruction) -> None:
        assert self.collectives is not None
        op, _, microbatch = instruction.action
        self.collectives.post(op, self.rank, microbatch)

    def _run_hook(self, instruction: Instruction) -> None:
        self.hooks[instruction.action.op](instruction.action.stage)

    def losses(self) -> dict[int, torch.Tensor]:
        """Returns the losses of the microbatches whose last stage ran here.

        With a sharded output layer the last stage may have a loss of the layers before, which is
        added. Raises PipelineError if a value of the step is left.
        """
        losses: dict[int, torch.Tensor] = {}
        for stage in self.runs.values():
            stage.check_empty()
            for microbatch, loss in stage.losses.items():
                losses[microbatch] = losses[microbatch] + loss if microbatch in losses else loss
        return losses


HANDLERS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("F", "B", "W", "BW", *SHARDED), RankRun._compute),
    **dict.fromkeys(ONCE, RankRun._run_hook),
    **dict.fromkeys(SENDS, RankRun._send),
    **dict.fromkeys(RECEIVES, RankRun._post_receive),
    **dict.fromkeys(COLLECTIVES, RankRun._post_collective),
}
