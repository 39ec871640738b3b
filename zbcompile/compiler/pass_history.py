"""The history of the compiler's passes over the model and its stages: graphs as text, operations, seconds."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zbcompile.amounts import format_bytes
from zbcompile.passes.capture.export import Captured
from zbcompile.passes.graph.fx import is_getitem
from zbcompile.passes.pass_list.passes_in_order import PASS_NAMES, PASSES
from zbcompile.passes.pass_list.run_passes import PassRun
from zbcompile.passes.split.joint_graph import Joint
from zbcompile.passes.split.saved_bytes import crossing_of
from zbcompile.passes.split.split import Split, closure
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.print_python import print_piece
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.verification.graph_views import graphs_of

CONTEXT = 3
OPERATIONS = "operations"
BYTES = ("what F keeps", "what W waits for")
_TITLES = {"model": ("F", "The model."), "stage": ("F", "The stage."), "joint": ("BW", "F, B and W in one.")}


@dataclass(frozen=True)
class PassCost:
    """One pass: `runs` times (over the model, or over each distinct stage), the figures (`figures_of`) of what it was
    given and made in all, what it moved or repeated, and its seconds."""

    name: str
    does: str
    runs: int
    before: Mapping[str, int]
    after: Mapping[str, int]
    moved: int
    repeated: int
    seconds: float

    @property
    def effect(self) -> str:
        """One sentence of what the pass changed, with figures; empty if it had nothing to do.

        >>> cost = {"operations": 9, "what F keeps": 4096}, {"operations": 8, "what F keeps": 2048}
        >>> PassCost("recompute", "", 1, *cost, moved=0, repeated=2, seconds=0.1).effect
        'drops 1 operation; what F keeps 4.0 -> 2.0 KiB; B repeats 2 operations'
        """
        return "; ".join(self._effects()) if self.runs else ""

    def _effects(self) -> Iterator[str]:
        now = self.after.get(OPERATIONS, 0)
        more = now - self.before.get(OPERATIONS, 0)
        yield f"{'adds' if more > 0 else 'drops'} {_operations(abs(more))}" if more else f"{_operations(now)} as before"
        for name in BYTES:
            before, after = (each.get(name) for each in (self.before, self.after))
            if after is not None and (before is None or format_bytes(before) != format_bytes(after)):
                yield f"{name} {_from_to(before, after)}"
        if self.moved:
            yield f"{_operations(self.moved)} moved"
        if self.repeated:
            yield f"B repeats {_operations(self.repeated)}"


@dataclass
class PassHistory:
    """Notes what the compiler's passes make: give it to the compiler as `observe`.

    With `texts` it also keeps the graphs for `difference`. Stages whose graphs differ only in names are compiled once,
    so not every stage goes through every pass.
    """

    texts: bool = False
    ran: list[PassCost] = field(default_factory=list)
    made: dict[tuple[str, int | None], Any] = field(default_factory=dict)

    def __call__(self, ran: PassRun) -> None:
        in_place = isinstance(ran.before, Captured)  # a canonicalisation: what it was given is no longer there
        before = self.ran[-1].after if in_place else figures_of(ran.before)
        moved = sum(each.operations for each in ran.made.improvements) if isinstance(ran.made, Split) else 0
        repeated = ran.made.recomputed.operations if ran.name == "recompute" and ran.made.recomputed else 0
        cost = PassCost(ran.name, "", 1, before, figures_of(ran.made), moved, repeated, ran.seconds)
        self.ran.append(cost)
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
    before, after = (_sum([getattr(each, which) for each in ran]) for which in ("before", "after"))
    moved, repeated = sum(each.moved for each in ran), sum(each.repeated for each in ran)
    return PassCost(name, does, len(ran), before, after, moved, repeated, sum(each.seconds for each in ran))


def _sum(each: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Figure by figure, of those that all have."""
    return {
        name: sum(found[name] for found in each) for name in (each[0] if each else ()) if all(name in e for e in each)
    }


def figures_of(made: Any) -> dict[str, int]:
    """The operations in the graphs of an artifact, BW, which repeats B and W, left out; and the bytes of what waits
    between its passes, by the closure alone if it is not split yet. Nothing of what has no graphs: a model."""
    if isinstance(made, torch.nn.Module):
        return {}
    of_pair = isinstance(made, tuple)  # whose halves are not those of one stage
    views = [view for view in graphs_of(made) if view.kind != "BW" or of_pair]
    found = {OPERATIONS: sum(not is_getitem(node) for view in views for node in view.calls)}
    if isinstance(made, Joint | Split | StageProgram):
        crossing = crossing_of(closure(made)) if isinstance(made, Joint) else made.crossing
        found |= dict(zip(BYTES, (crossing.kept, crossing.residue), strict=True))
    return found


def _operations(count: int) -> str:
    return f"{count:,} operation{'s' * (count != 1)}"


def _from_to(before: int | None, after: int) -> str:
    """One size, or two with the unit said once if they share it."""
    new = format_bytes(after)
    if before is None:
        return new
    old = format_bytes(before)
    number, unit = old.split(" ")
    return f"{number if new.endswith(f' {unit}') else old} -> {new}"


def _text(made: Any) -> str:
    """The graphs of an artifact, each as a Python function."""
    printed = []
    for view in [] if isinstance(made, str) else graphs_of(made):
        name, title = _TITLES.get(view.kind, (view.kind, f"{view.kind}."))
        if view.kind != "BW":
            printed.append(print_piece(Piece(name, view.module, view.inputs, view.outputs), title))
    return made if isinstance(made, str) else "".join(printed)
