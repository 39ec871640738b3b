"""Running passes: each is timed and reported to the observer; its result is checked if that is asked for."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zbcompile.passes.torch_private import quick_traces
from zbcompile.passes.verification.rule import Rule, verify


@dataclass(frozen=True)
class Pass:
    """One pass of the compiler: `run(before, *given)` makes a new artifact of the one before it.

    `does` describes it in a few words; `holds` are the rules that its result obeys.
    """

    name: str
    does: str
    run: Callable[..., Any]
    holds: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class PassRun:
    """A pass that was run over the model (`stage` is None) or over one stage, and the `seconds` that it took."""

    name: str
    stage: int | None
    before: Any
    made: Any
    seconds: float


Observer = Callable[[PassRun], None]


@dataclass(frozen=True)
class PassManager:
    """Runs passes. `observe` is called with each when done; with `check` the result of a pass must obey its rules."""

    observe: Observer | None = None
    check: bool = False

    def run(self, step: Pass, before: Any, *given: Any, stage: int | None = None) -> Any:
        """Run `step` on `before`. Raises VerificationError if the result breaks a rule, and whatever `step` raises."""
        began = time.perf_counter()
        with quick_traces():
            made = step.run(before, *given)
        seconds = time.perf_counter() - began
        if self.check:
            verify(step.name, step.holds, made, before)
        if self.observe is not None:
            self.observe(PassRun(step.name, stage, before, made, seconds))
        return made

    def run_all(self, steps: Sequence[Pass], first: Any, *given: Any, stage: int | None = None) -> list[Any]:
        """Run `steps` one after the other, each on the result of the one before it; return all results."""
        made = [first]
        for step in steps:
            made.append(self.run(step, made[-1], *given, stage=stage))
        return made[1:]


SILENT = PassManager()
