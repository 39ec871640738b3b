"""The action loop: one handler per action, nothing known of how the order was made."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from zbcompile.faults import Position
from zbcompile.rank_plan import Instruction, Message, RankPlan
from zbcompile.schedules.actions import Action
from zbcompile.stage_plan import Tensors
from zbcompile.stage_run import StageRun
from zbcompile.transport import Transport

Observer = Callable[[Action, "RankRun", Callable[[], None]], None]


@dataclass
class RankRun:
    """One rank during one step. `runs[stage]` are its stages, `outbox` what was made but not yet sent, `position` is
    where others look to see how far the rank is; `after[action]` is called when `action` is done."""

    plan: RankPlan
    runs: Mapping[int, StageRun]
    transport: Transport
    position: Position
    observe: Observer | None = None
    after: Mapping[Action, Callable[[], None]] = field(default_factory=dict)
    outbox: dict[Message, Tensors] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return self.plan.rank

    def run(self) -> Iterator[Action]:
        """Carry out the rank's program. Yields an action for as long as its input has not arrived."""
        transport, position, observe = self.transport, self.position, self.observe
        for step in self.plan.instructions:
            for instruction in step:
                action = position.action = instruction.action
                handler = HANDLERS[action.op]
                if instruction.needs is not None:
                    while not transport.ready(instruction.needs):
                        yield action
                        position.action = action
                    position.waits = True
                    transport.wait(instruction.needs)
                    position.waits = False
                    transport.complete(instruction.completes)
                if observe is None:
                    handler(self, instruction)
                else:
                    observe(action, self, partial(handler, self, instruction))
                if action in self.after:
                    self.after[action]()

    def _forward(self, to: Instruction) -> None:
        self._pass_on(to, self.runs[to.action.stage].forward(to.action.microbatch, self._taken(to)))

    def _backward(self, to: Instruction) -> None:
        self._pass_on(to, self.runs[to.action.stage].backward(to.action.microbatch, self._taken(to)))

    def _full_backward(self, to: Instruction) -> None:
        self._pass_on(to, self.runs[to.action.stage].full_backward(to.action.microbatch, self._taken(to)))

    def _weight(self, to: Instruction) -> None:
        self.runs[to.action.stage].weight(to.action.microbatch)

    def _taken(self, to: Instruction) -> Tensors:
        return self.transport.take(to.needs) if to.needs is not None else []

    def _pass_on(self, to: Instruction, values: Tensors) -> None:
        if to.makes is None:
            return
        if to.local:
            self.transport.deliver(to.makes, values)
        else:
            self.outbox[to.makes] = values

    def _send(self, to: Instruction) -> None:
        assert to.carries is not None
        self.transport.send(to.carries, self.outbox.pop(to.carries), to.peer)

    def _receive(self, to: Instruction) -> None:
        assert to.carries is not None
        self.transport.post(to.carries, to.buffers, to.peer)


HANDLERS: Mapping[str, Callable[[RankRun, Instruction], None]] = {
    "F": RankRun._forward,
    "B": RankRun._backward,
    "W": RankRun._weight,
    "BW": RankRun._full_backward,
    "SEND_F": RankRun._send,
    "SEND_B": RankRun._send,
    "RECV_F": RankRun._receive,
    "RECV_B": RankRun._receive,
}
