"""The action loop: one handler per kind of action, independent of how the order was made."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from zbcompile.distributed.transport import Transport
from zbcompile.engine.rank_plan import Instruction, RankPlan
from zbcompile.engine.stage import StageRun
from zbcompile.engine.stage_plan import SHARD, Tensors
from zbcompile.engine.vocabulary import Collectives
from zbcompile.faults.fault_report import Position
from zbcompile.program.program import Program
from zbcompile.schedules import Schedule
from zbcompile.schedules.ir.actions import COLLECTIVES, EXCHANGES, ONCE, RECEIVES, SENDS, Action
from zbcompile.schedules.ir.schedule import TORCH_LETTERS, format_step
from zbcompile.schedules.lowering.edges import Message


class Observer:
    """Called in place of an action, or of the two of a pair, with their instructions; it calls
    `execute`. In the middle of a pair it is told when the first has `ended` and when the second,
    after its wait, has begun.
    """

    def __call__(
        self, of: Sequence[Instruction], run: "RankRun", execute: Callable[[], None]
    ) -> None:
        execute()

    def ended(self, first: Action, run: "RankRun") -> None:
        pass

    def began(self, second: Action, run: "RankRun") -> None:
        pass


@dataclass(frozen=True)
class ActionLabels(Observer):
    """Names actions for torch.profiler as torch's pipeline runtime does (`PP:0F3`), around another
    observer."""

    inner: Observer

    def __call__(
        self, of: Sequence[Instruction], run: "RankRun", execute: Callable[[], None]
    ) -> None:
        with record_function("PP:" + "|".join(_torch_name(each.action) for each in of)):
            self.inner(of, run, execute)

    def ended(self, first: Action, run: "RankRun") -> None:
        self.inner.ended(first, run)

    def began(self, second: Action, run: "RankRun") -> None:
        self.inner.began(second, run)


def _torch_name(action: Action) -> str:
    return format_step(action, "torch") if action.op in TORCH_LETTERS else str(action)


class StepRecorder(Protocol):
    """Records steps: gives an observer for each, and takes it back when the step has ended."""

    def begin(self, program: Program, schedule: Schedule) -> Observer: ...
    def end(self) -> None: ...


class SharedActions(Protocol):
    """What the ranks of a process share in a step (`zbcompile.engine.step`): the actions that
    it has once per stage or rank, and the collectives among the shards of an output layer."""

    collectives: Collectives | None

    def ready(self, op: str, rank: int) -> bool: ...
    def carry_out(self, action: Action, rank: int) -> None: ...


@dataclass
class RankRun:
    """One rank during one step. `runs[stage]` are its stages, `outbox` what was made but not yet
    sent, `position` shows other threads how far the rank is. If the output layer is sharded, the
    rank's shards are stages as well. `shared` does what is done once per stage or rank, by the
    optimizer within the step and by all ranks together.
    """

    plan: RankPlan
    runs: Mapping[int, StageRun]
    transport: Transport
    position: Position
    observe: Observer | None = None
    shared: SharedActions | None = None
    outbox: dict[Message, Tensors] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.plan.rank

    def run(self) -> Iterator[Action]:
        """Carry out the rank's program. Yields an action for as long as its input has not
        arrived."""
        ready = self.transport.ready
        for step in self.plan.instructions:
            first = step[0]
            if first.exchange and self.shared is not None:
                while not self.shared.ready(first.action.op, self.rank):
                    yield first.action
            for instruction in step:
                for message in instruction.needs:
                    while not ready(message):
                        yield instruction.action
            if first.needs:
                self._arrive(first)
            self._execute(step)

    def _execute(self, step: tuple[Instruction, ...]) -> None:
        action = self.position.action = step[0].action
        handler = HANDLERS[action.op] if len(step) == 1 else RankRun._pair
        if self.observe is None:
            handler(self, *step)
        else:
            self.observe(step[:2], self, partial(handler, self, *step))

    def _arrive(self, to: Instruction) -> None:
        """Wait for what an action needs."""
        self.position.action, self.position.waits = to.action, True
        for message in to.needs:
            self.transport.wait(message)
        self.position.waits = False
        self.transport.complete(to.completes)

    def _pair(self, first: Instruction, second: Instruction, *sends: Instruction) -> None:
        """Run both as one graph, in whose middle the first's results are sent and the second's
        input is waited for."""
        (op, stage, microbatch), (other_op, other_stage, other_microbatch) = (
            first.action,
            second.action,
        )
        one, other = self.runs[stage], self.runs[other_stage]
        call, other_call = one.call(op, microbatch), other.call(other_op, other_microbatch)

        def take(results: Tensors) -> None:
            self._pass_on(first, one.end(call, microbatch, results))
            if self.observe is not None:
                self.observe.ended(first.action, self)
            for send in sends:
                self._execute((send,))

        def give() -> Tensors:
            if second.needs:
                self._arrive(second)
            if self.observe is not None:
                self.observe.began(second.action, self)
            return other.begin(other_call, other_microbatch, self._taken(second))

        values: list[Any] = one.begin(call, microbatch, self._taken(first))
        results = self.plan.merged[first.action, second.action]([*values, take, give])
        self._pass_on(second, other.end(other_call, other_microbatch, results))

    def _compute(self, to: Instruction) -> None:
        op, stage, microbatch = to.action
        self._pass_on(to, self.runs[stage].run(op, microbatch, self._taken(to)))

    def _shard(self, to: Instruction) -> None:
        self._pass_on(to, self.runs[SHARD].run(to.action.op, to.action.microbatch, self._taken(to)))

    def _taken(self, to: Instruction) -> Tensors:
        needs = to.needs
        if not needs:
            return []
        if len(needs) == 1:
            return self.transport.take(needs[0])
        return [value for message in needs for value in self.transport.take(message)]

    def _pass_on(self, to: Instruction, values: Tensors) -> None:
        for message, local in to.makes:
            if local:
                self.transport.deliver(message, values)
            else:
                self.outbox[message] = values

    def _send(self, to: Instruction) -> None:
        assert to.carries is not None
        self.transport.send(to.carries, self.outbox.pop(to.carries), to.peer)

    def _receive(self, to: Instruction) -> None:
        assert to.carries is not None
        self.transport.post(to.carries, to.buffers, to.peer)

    def _announce(self, to: Instruction) -> None:
        assert self.shared is not None
        assert self.shared.collectives is not None
        self.shared.collectives.post(to.action.op, self.rank, to.action.microbatch)

    def _once(self, to: Instruction) -> None:
        assert self.shared is not None
        self.shared.carry_out(to.action, self.rank)

    def losses(self) -> dict[int, torch.Tensor]:
        """The losses of the microbatches whose last stage ran here, after a check that nothing of
        the step is left.

        If the output layer is sharded, the last stage may have a loss of the layers before, which
        is added.
        """
        for stage in self.runs.values():
            stage.check_empty()
        return sum_losses(stage.losses for stage in self.runs.values())

    def outputs(self) -> Iterator[tuple[str, dict[int, torch.Tensor]]]:
        """The leaves of the model's output that this rank has made, each by microbatch."""
        for stage in self.runs.values():
            yield from stage.outputs.items()


def sum_losses(parts: Iterable[Mapping[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Returns the loss of each microbatch: beside a sharded output layer a stage may add a loss of
    its own."""
    losses: dict[int, torch.Tensor] = {}
    for part in parts:
        for microbatch, loss in part.items():
            losses[microbatch] = losses[microbatch] + loss if microbatch in losses else loss
    return losses


HANDLERS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("F", "B", "W", "BW"), RankRun._compute),
    **dict.fromkeys(("S", "T"), RankRun._shard),
    **dict.fromkeys((*ONCE, *EXCHANGES), RankRun._once),
    **dict.fromkeys(SENDS, RankRun._send),
    **dict.fromkeys(RECEIVES, RankRun._receive),
    **dict.fromkeys(COLLECTIVES, RankRun._announce),
}
