"""The action loop: one handler per action, nothing known of how the order was made."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from zbcompile.faults import Position
from zbcompile.passes.slots import TensorSpec
from zbcompile.schedules.actions import Action, Pair, Step
from zbcompile.stage_run import StageRun
from zbcompile.transport import Message, Transport

Observer = Callable[[Action, "RankRun", Callable[[], None]], None]


@dataclass
class RankRun:
    """One rank during one step. `runs[stage]` are its stages, `outbox` what was made but not yet sent,
    `position` is where others look to see how far the rank is."""

    rank: int
    order: tuple[Step, ...]
    runs: Mapping[int, StageRun]
    rank_of: Callable[[int], int]
    last_stage: int
    transport: Transport
    position: Position
    observe: Observer | None = None
    outbox: dict[Message, list[torch.Tensor]] = field(default_factory=dict)

    def run(self) -> Iterator[Action]:
        """Carry out the rank's order. Yields an action for as long as its input has not arrived."""
        for step in self.order:
            for action in step if isinstance(step, Pair) else (step,):
                needed = self._needs(action)
                self.position.action = action
                if needed is not None:
                    while not self.transport.ready(needed):
                        yield action
                        self.position.action = action
                    self.position.waits = True
                    self.transport.wait(needed)
                    self.position.waits = False
                if self.observe is None:
                    HANDLERS[action.op](self, action)
                else:
                    self.observe(action, self, partial(HANDLERS[action.op], self, action))

    def _needs(self, action: Action) -> Message | None:
        if action.op == "F" and action.stage > 0:
            return Message("F", action.stage, action.microbatch)
        if action.op in ("B", "BW") and action.stage < self.last_stage:
            return Message("B", action.stage, action.microbatch)
        return None

    def _take(self, action: Action) -> list[torch.Tensor]:
        needed = self._needs(action)
        return [] if needed is None else self.transport.take(needed)

    def _forward(self, action: Action) -> None:
        values = self.runs[action.stage].forward(action.microbatch, self._take(action))
        self._pass_on(Message("F", action.stage + 1, action.microbatch), values)

    def _backward(self, action: Action) -> None:
        values = self.runs[action.stage].backward(action.microbatch, self._take(action))
        self._pass_on(Message("B", action.stage - 1, action.microbatch), values)

    def _full_backward(self, action: Action) -> None:
        values = self.runs[action.stage].full_backward(action.microbatch, self._take(action))
        self._pass_on(Message("B", action.stage - 1, action.microbatch), values)

    def _weight(self, action: Action) -> None:
        self.runs[action.stage].weight(action.microbatch)

    def _pass_on(self, message: Message, values: list[torch.Tensor]) -> None:
        if not 0 <= message.stage <= self.last_stage:
            return
        if self.rank_of(message.stage) == self.rank:
            self.transport.deliver(message, values)
        else:
            self.outbox[message] = values

    def _send_forward(self, action: Action) -> None:
        self._send(Message("F", action.stage + 1, action.microbatch))

    def _send_backward(self, action: Action) -> None:
        self._send(Message("B", action.stage - 1, action.microbatch))

    def _send(self, message: Message) -> None:
        self.transport.send(message, self.outbox.pop(message), self.rank_of(message.stage))

    def _receive_forward(self, action: Action) -> None:
        stage = self.runs[action.stage].stage
        specs = list(stage.program.receives.values())
        if stage.generator_arrives:
            specs.append(generator_spec(stage.device))
        self.transport.post(Message("F", action.stage, action.microbatch), specs, self.rank_of(action.stage - 1))

    def _receive_backward(self, action: Action) -> None:
        specs = list(self.runs[action.stage].stage.program.gradients_in.values())
        self.transport.post(Message("B", action.stage, action.microbatch), specs, self.rank_of(action.stage + 1))


def generator_spec(device: torch.device) -> TensorSpec:
    """The shape of the generator state that travels with activations."""
    size = 16 if device.type == "cuda" else torch.get_rng_state().numel()
    return TensorSpec((size,), (1,), "uint8", str(device))


HANDLERS: Mapping[str, Callable[[RankRun, Action], None]] = {
    "F": RankRun._forward,
    "B": RankRun._backward,
    "W": RankRun._weight,
    "BW": RankRun._full_backward,
    "SEND_F": RankRun._send_forward,
    "SEND_B": RankRun._send_backward,
    "RECV_F": RankRun._receive_forward,
    "RECV_B": RankRun._receive_backward,
}
