"""The pen of the generators: it knows which microbatch comes next, so that a generator reads like its paper."""

from collections import defaultdict
from collections.abc import Mapping

from zbcompile.schedules.ir.actions import BW, Action, B, F, Pair, Step, W


class Writer:
    """Writes the order of one rank. Each call adds the next microbatch of that operation on that stage.

    `microbatches` is how many each stage runs, `first` the number of a stage's first one, where that is not 0.

    >>> write = Writer(2)
    >>> write.f(0), write.f(0), write.b(0), write.bw(0), write.w(0)
    (None, None, None, None, None)
    >>> [str(step) for step in write.order]
    ['F0.0', 'F0.1', 'B0.0', 'BW0.1', 'W0.0']
    """

    def __init__(self, microbatches: int, first: Mapping[int, int] | None = None) -> None:
        self.order: list[Step] = []
        self._microbatches = microbatches
        self._first = dict(first or {})
        self._forwards: dict[int, int] = defaultdict(int, self._first)  # by stage, the next microbatch
        self._backwards: dict[int, int] = defaultdict(int, self._first)
        self.pending: list[Action] = []  # weight gradients, oldest first

    def f(self, stage: int) -> None:
        """The next forward of `stage`."""
        self.order.append(self._forward(stage))

    def b(self, stage: int) -> None:
        """The next input gradient of `stage`; its weight gradient becomes pending."""
        microbatch = self._backward(stage)
        self.pending.append(Action(W, stage, microbatch))
        self.order.append(Action(B, stage, microbatch))

    def w(self, stage: int | None = None) -> None:
        """The oldest pending weight gradient, or the oldest of `stage`."""
        at = next(i for i, action in enumerate(self.pending) if stage in (None, action.stage))
        self.order.append(self.pending.pop(at))

    def bw(self, stage: int) -> None:
        """The next backward of `stage`, fused."""
        self.order.append(Action(BW, stage, self._backward(stage)))

    def pair(self, forward_stage: int, backward_stage: int) -> None:
        """The next forward of one stage together with the next fused backward of another."""
        forward = self._forward(forward_stage)
        self.order.append(Pair(forward, Action(BW, backward_stage, self._backward(backward_stage))))

    def flush(self, *stages: int) -> None:
        """All pending weight gradients, stage by stage."""
        for stage in stages:
            for _ in [action for action in self.pending if action.stage == stage]:
                self.w(stage)

    def has_f(self, stage: int) -> bool:
        return self._forwards[stage] < self._first.get(stage, 0) + self._microbatches

    def has_b(self, stage: int) -> bool:
        return self._backwards[stage] < self._first.get(stage, 0) + self._microbatches

    def _forward(self, stage: int) -> Action:
        microbatch = self._forwards[stage]
        self._forwards[stage] = microbatch + 1
        return Action(F, stage, microbatch)

    def _backward(self, stage: int) -> int:
        microbatch = self._backwards[stage]
        self._backwards[stage] = microbatch + 1
        return microbatch
