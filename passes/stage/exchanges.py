"""The collectives in the graphs of a stage: what it exchanges with ranks beside the pipeline, and in which pass."""

from dataclasses import dataclass

from zbcompile.passes.graph.process_groups import group_of
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.stage.stage_program import StageProgram


@dataclass(frozen=True)
class Collective:
    """An exchange in pass `name` ("F", "B", "W" or "BW"): which `kind`, along which `dimension` of the mesh, with how
    many `bytes` from this rank, by which `operation` of the graph."""

    name: str
    kind: str
    dimension: str
    bytes: int
    operation: str


def collectives_of(program: StageProgram) -> list[Collective]:
    """The collectives of a stage, pass by pass, in the order in which they are issued."""
    found = []
    for name, node in ((name, node) for name, piece in program.pieces.items() for node in piece.module.graph.nodes):
        if (group := group_of(node)) is not None:
            given = [tensor for source in node.all_input_nodes for tensor in tensors_of(source.meta.get("val"))]
            kind = node.target.overloadpacket.__name__
            found.append(Collective(name, kind, group, sum(tensor.nbytes for tensor in given), node.name))
    return found
