"""The graphs in the result of a pass, in one form for rules, reports and differences."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import GraphModule, Node

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.capture.export import Captured
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.partition.stage_graphs import Stage
from zbcompile.passes.split.joint_graph import Joint
from zbcompile.passes.split.split import Split
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.overlap import MergedPieces
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram

NO_GRADIENT = Slot("output", "(no gradient)")


@dataclass(frozen=True)
class GraphView:
    """One graph with its roles. `kind` is "model", "stage", "joint", the name of a piece (F, B, ...) or "pair"."""

    kind: str
    title: str
    module: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @property
    def nodes(self) -> list[Node]:
        return list(self.module.graph.nodes)

    @cached_property
    def calls(self) -> list[Node]:
        """The operations, in order."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]

    @cached_property
    def arriving(self) -> list[tuple[Slot, Node]]:
        """The placeholders with their roles."""
        return list(zip(self.inputs, self.module.graph.find_nodes(op="placeholder"), strict=False))

    @cached_property
    def leaving(self) -> list[tuple[Slot, Any]]:
        """The results with their roles."""
        return list(zip(self.outputs, output_values(self.module.graph), strict=False))


def count_operations(made: Any) -> int:
    """Returns how many operations the graphs of an artifact have. BW of a stage, which repeats B and W, is left out."""
    is_pair = isinstance(made, tuple)  # its halves belong to two stages
    return sum(len(view.calls) for view in graphs_of(made) if view.kind != "BW" or is_pair)


def graphs_of(made: Any) -> Iterator[GraphView]:
    """The graphs in an artifact of the compiler; `made` may also be a tuple of artifacts."""
    if isinstance(made, tuple):
        for each in made:
            yield from graphs_of(each)
    elif isinstance(made, Captured):
        yield GraphView("model", "the model", made.module, made.inputs, made.outputs)
    elif isinstance(made, Canonical):
        yield GraphView("model", "the model", made.module, made.captured.inputs, made.captured.outputs)
    elif isinstance(made, Stage):
        yield GraphView("stage", f"stage {made.index}", made.module, made.inputs, made.outputs)
    elif isinstance(made, Joint):
        inputs = tuple(slot for slot, _ in made.inputs)
        title = f"the joint graph of stage {made.stage.index}"
        yield GraphView("joint", title, made.module, inputs, _outputs_of(made))
    elif isinstance(made, MergedPieces):
        inputs = (*made.first.inputs, *(Slot("input", name) for name in ("take", "give")))
        title = f"the pair of {made.first.name} and {made.second.name}"
        yield GraphView("pair", title, made.module, inputs, made.second.outputs)
    elif isinstance(made, Piece):
        yield _piece(made, "its stage")
    else:
        yield from pieces_of(made).values()


def pieces_of(made: Split | StageProgram | VocabularyProgram) -> dict[str, GraphView]:
    """The executable graphs of a stage, or of all shards of an output layer, by name."""
    if isinstance(made, Split):
        pieces = (made.forward, made.backward, made.weight, made.fused)
        return {piece.name: _piece(piece, f"stage {made.joint.stage.index}") for piece in pieces}
    if isinstance(made, StageProgram):
        return {name: _piece(piece, f"stage {made.stage}") for name, piece in made.pieces.items()}
    shards = enumerate(made.pieces)
    return {f"{name}{i}": _piece(piece, f"shard {i}") for i, each in shards for name, piece in each.items()}


def _piece(piece: Piece, whose: str) -> GraphView:
    return GraphView(piece.name, f"{piece.name} of {whose}", piece.module, piece.inputs, piece.outputs)


def _outputs_of(joint: Joint) -> tuple[Slot, ...]:
    """The slot of each value that a joint graph returns; NO_GRADIENT if there is none."""
    pending, slots = list(joint.outputs), []
    for value in output_values(joint.module.graph):
        found = next((pair for pair in pending if pair[1] is value), None)
        slots.append(NO_GRADIENT if found is None else found[0])
        if found is not None:
            pending.remove(found)
    return tuple(slots)
