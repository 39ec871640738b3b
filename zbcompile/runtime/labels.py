"""The names of actions in torch.profiler."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.profiler import record_function

from zbcompile.runtime.action_loop import Observer, RankRun
from zbcompile.schedules.ir.actions import Action
from zbcompile.schedules.ir.schedule import TORCH_LETTERS, format_step


@dataclass(frozen=True)
class Labels:
    """Names actions for torch.profiler as torch's pipeline runtime does (`PP:0F3`), around an observer or alone."""

    inner: Observer | None

    def __call__(self, actions: Sequence[Action], run: RankRun, execute: Callable[[], None]) -> None:
        with record_function("PP:" + "|".join(map(_torch_name, actions))):
            if self.inner is None:
                execute()
            else:
                self.inner(actions, run, execute)

    def ended(self, first: Action, run: RankRun) -> None:
        if self.inner is not None:
            self.inner.ended(first, run)

    def began(self, second: Action, run: RankRun) -> None:
        if self.inner is not None:
            self.inner.began(second, run)


def _torch_name(action: Action) -> str:
    return format_step(action, "torch") if action.op in TORCH_LETTERS else str(action)
