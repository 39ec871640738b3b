"""What each pass of the compiler made of a stage, as text, and what one of them changed."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.partition.stage_graphs import Stage
from zbcompile.passes.split.joint_graph import Joint
from zbcompile.passes.split.split import Split
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.print_python import print_piece
from zbcompile.passes.stage.stage_program import StageProgram

CONTEXT = 3


@dataclass
class PassHistory:
    """Notes what the compiler's passes make: give it to the compiler as `observe`.

    `made[stage][name]` is what the pass `name` made of a stage. Stages whose graphs differ in names alone are compiled
    once, so not every stage is here.
    """

    made: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, stage: int, name: str, made: Any) -> None:
        self.made.setdefault(stage, {})[name] = made

    def difference(self, stage: int, first: str, second: str) -> str:
        """A unified diff of the stage's graphs after the pass `first` and after `second`."""
        before, after = ("".join(graphs_text(self.made[stage][name])).splitlines() for name in (first, second))
        old, new = (f"stage {stage} after {name}" for name in (first, second))
        lines = list(difflib.unified_diff(before, after, old, new, n=CONTEXT, lineterm=""))
        return "\n".join(lines or [f"stage {stage}: nothing changed from {first} to {second}"]) + "\n"


def graphs_text(made: Stage | Joint | Split | StageProgram) -> Iterator[str]:
    """The graphs that a pass made, each as a Python function."""
    if isinstance(made, Stage):
        yield print_piece(Piece("F", made.module, made.inputs, made.outputs), "The stage.")
    elif isinstance(made, Joint):
        inputs = tuple(slot for slot, _ in made.inputs)
        yield print_piece(
            Piece("BW", made.module, inputs, _slots(made.module, list(made.outputs))), "F, B and W in one."
        )
    elif isinstance(made, Split):
        for piece in (made.forward, made.backward, made.weight):
            yield print_piece(piece, f"{piece.name}.")
    else:
        for name in ("F", "B", "W"):
            yield print_piece(made.pieces[name], f"{name}.")


def _slots(module: GraphModule, outputs: list[tuple[Slot, Node]]) -> tuple[Slot, ...]:
    """The slot of each value that a joint graph returns; what has none (no gradient) is called so."""
    slots = []
    for value in output_values(module.graph):
        found = next((pair for pair in outputs if pair[1] is value), None)
        slots.append(found[0] if found else Slot("output", "(no gradient)"))
        if found:
            outputs.remove(found)
    return tuple(slots)
