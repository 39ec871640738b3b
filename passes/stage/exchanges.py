"""The collectives in the graphs of a stage: what it exchanges with ranks beside the pipeline, and in which pass."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import GraphModule

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
    return [each for name, piece in program.pieces.items() for each in _collectives_in(name, piece.module)]


def _collectives_in(name: str, module: GraphModule) -> Iterator[Collective]:
    for node in module.graph.nodes:
        group = group_of(node)
        if group is not None:
            given = [tensor for source in node.all_input_nodes for tensor in tensors_of(source.meta.get("val"))]
            kind = node.target.overloadpacket.__name__
            yield Collective(name, kind, group, sum(tensor.nbytes for tensor in given), node.name)
