"""The history of the compiler's passes over the model and its stages: graphs as text, operations, seconds."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zbcompile.passes.capture.export import Captured
from zbcompile.passes.graph.fx import is_getitem
from zbcompile.passes.pass_list.passes_in_order import PASS_NAMES, PASSES
from zbcompile.passes.pass_list.run_passes import Ran
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.print_python import print_piece
from zbcompile.passes.verification.graph_views import graphs_of

CONTEXT = 3
_TITLES = {"model": ("F", "The model."), "stage": ("F", "The stage."), "joint": ("BW", "F, B and W in one.")}


@dataclass(frozen=True)
class PassCost:
    """One pass: `runs` times (over the model, or over each distinct stage), the operations that it was given and made
    in all (BW, which repeats B and W, not counted; `before` is None for a capture), and its seconds."""

    name: str
    does: str
    runs: int
    before: int | None
    after: int
    seconds: float


@dataclass
class PassHistory:
    """Notes what the compiler's passes make: give it to the compiler as `observe`.

    With `texts` it also keeps the graphs for `difference`. Stages whose graphs differ only in names are compiled once,
    so not every stage goes through every pass.
    """

    texts: bool = False
    ran: list[PassCost] = field(default_factory=list)
    made: dict[tuple[str, int | None], Any] = field(default_factory=dict)

    def __call__(self, ran: Ran) -> None:
        in_place = isinstance(ran.before, Captured)  # a canonicalisation: what it was given is no longer there
        before = self.ran[-1].after if in_place else count_operations(ran.before)
        self.ran.append(PassCost(ran.name, "", 1, before, count_operations(ran.made) or 0, ran.seconds))
        if self.texts:
            self.made[ran.name, ran.stage] = _text(ran.made) if isinstance(ran.made, Captured) else ran.made

    def costs(self) -> list[PassCost]:
        """The cost of every pass of the compiler, in order; `runs` is 0 for one that had nothing to do."""
        return [_total(each.name, each.does, [ran for ran in self.ran if ran.name == each.name]) for each in PASSES]

    def difference(self, stage: int, original: int, first: str, second: str) -> str:
        """A unified diff of the graphs of a stage, or of the model if a pass is over the model, after the pass
        `first` and after `second`. `original` is the stage whose graphs the stage has."""
        (old, before), (new, after) = (self._after(name, stage, original) for name in (first, second))
        lines = list(difflib.unified_diff(before, after, old, new, n=CONTEXT, lineterm=""))
        return "\n".join(lines or [f"stage {stage}: nothing changed from {first} to {second}"]) + "\n"

    def _after(self, name: str, stage: int, original: int) -> tuple[str, list[str]]:
        """The graphs after a pass, with a title. A pass that had nothing to do leaves its input."""
        for earlier in reversed(PASS_NAMES[: PASS_NAMES.index(name) + 1]):
            for whose in (stage, original, None):
                made = self.made.get((earlier, whose))
                if made is not None:
                    if isinstance(made, tuple):  # the stages, as they are cut
                        made, whose = made[stage], stage
                    title = "the model" if whose is None else f"stage {whose}"
                    return f"{title} after {name}", _text(made).splitlines()
        raise AssertionError(f"no pass before {name} was recorded")


def _total(name: str, does: str, ran: Sequence[PassCost]) -> PassCost:
    before = None if any(each.before is None for each in ran) else sum(each.before or 0 for each in ran)
    return PassCost(name, does, len(ran), before, sum(each.after for each in ran), sum(each.seconds for each in ran))


def count_operations(made: Any) -> int | None:
    """The operations in the graphs of an artifact, BW left out; None for what has no graphs yet: a model."""
    views = [] if isinstance(made, torch.nn.Module) else [view for view in graphs_of(made) if view.kind != "BW"]
    return sum(not is_getitem(node) for view in views for node in view.calls) if views else None


def _text(made: Any) -> str:
    """The graphs of an artifact, each as a Python function."""
    printed = []
    for view in [] if isinstance(made, str) else graphs_of(made):
        name, title = _TITLES.get(view.kind, (view.kind, f"{view.kind}."))
        if view.kind != "BW":
            printed.append(print_piece(Piece(name, view.module, view.inputs, view.outputs), title))
    return made if isinstance(made, str) else "".join(printed)
