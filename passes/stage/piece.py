"""Pieces: the executable graphs of a stage, with a slot for every input and output."""

from dataclasses import dataclass

from torch.fx import GraphModule

from zbcompile.passes.graph.roles import Slot

LATER = {"F": ("B", "W"), "B": ("W",), "W": (), "BW": ()}


@dataclass(frozen=True)
class Piece:
    """One graph: `module` takes values for `inputs` and returns those of `outputs`, in order."""

    name: str
    module: GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @property
    def empty(self) -> bool:
        """True if the graph computes nothing."""
        return not any(node.op == "call_function" for node in self.module.graph.nodes)
