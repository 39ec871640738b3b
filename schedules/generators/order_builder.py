"""Writes the order of one rank: keeps count of the next microbatch, so that a generator reads like
its paper."""

from collections.abc import Mapping

from zbcompile.schedules.ir.actions import BW, Action, B, F, Pair, Step, W
from zbcompile.schedules.ir.kinds import result_of


class OrderBuilder:
    """Writes the order of one rank. Each call adds the next microbatch of that operation on that
    stage.

    `microbatches` is how many each stage runs, `first` the number of a stage's first one, where
    that is not 0.

    >>> builder = OrderBuilder(2)
    >>> builder.f(0), builder.f(0), builder.b(0), builder.bw(0), builder.w(0)
    (None, None, None, None, None)
    >>> [str(step) for step in builder.order]
    ['F0.0', 'F0.1', 'B0.0', 'BW0.1', 'W0.0']
    """

    def __init__(self, microbatches: int, first: Mapping[int, int] | None = None) -> None:
        self.order: list[Step] = []
        self.pending: list[Action] = []  # weight gradients, oldest first
        self._microbatches = microbatches
        self._first = first or {}
        self._counts: dict[tuple[str, int], int] = {}  # passes written, by result and stage

    def f(self, stage: int) -> None:
        """Adds the next forward of `stage`."""
        self.order.append(self._next(F, stage))

    def b(self, stage: int) -> None:
        """Adds the next input gradient of `stage`; its weight gradient becomes pending."""
        self.order.append(self._next(B, stage))
        self.pending.append(Action(W, *self.order[-1][1:]))  # type: ignore[arg-type]

    def w(self, stage: int | None = None) -> None:
        """Adds the oldest pending weight gradient, or the oldest of `stage`."""
        oldest = next(action for action in self.pending if stage in (None, action.stage))
        self.pending.remove(oldest)
        self.order.append(oldest)

    def bw(self, stage: int) -> None:
        """Adds the next backward of `stage`, fused."""
        self.order.append(self._next(BW, stage))

    def pair(self, forward_stage: int, backward_stage: int) -> None:
        """Adds the next forward of one stage together with the next fused backward of another."""
        self.order.append(Pair(self._next(F, forward_stage), self._next(BW, backward_stage)))

    def flush(self, *stages: int) -> None:
        """Adds all pending weight gradients, stage by stage."""
        for stage in stages:
            self.order += [action for action in self.pending if action.stage == stage]
            self.pending = [action for action in self.pending if action.stage != stage]

    def has(self, op: str, stage: int) -> bool:
        """Returns whether an F or a B of `stage` is left."""
        return self._counts.get((op, stage), 0) < self._microbatches

    def _next(self, op: str, stage: int) -> Action:
        key = (result_of(op), stage)
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        return Action(op, stage, self._first.get(stage, 0) + count)
