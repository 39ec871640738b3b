"""The peak memory of a pass while it runs."""

from collections.abc import Set

from torch.fx import Node

from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import alive_bytes, storages_behind
from zbcompile.passes.split.saved_bytes import LOSS, RESIDENT, is_resident
from zbcompile.passes.split.subgraphs import LATER, Piece
from zbcompile.passes.stage.stage_program import StageProgram

ARRIVING = ("activation", "tangent")  # from other stages
ALIVE = (*RESIDENT, "accumulator")  # before and after, whatever runs


def transient_bytes(stage: StageProgram, name: str, buffered: bool = False, views: bool = False) -> int:
    """The most bytes of one microbatch that are alive at once while the pass `name` of `stage` runs.

    Counted are what waited for the pass or arrives for it, what it makes on its way and what it returns; not
    parameters, buffers, gradient buffers and the user's inputs, nor what a kernel allocates for itself. A value is
    freed after its last use; an input only if no later pass reads it, and, where messages are `buffered`, what arrived
    not before the pass ends. Saved views of a parameter count only with `views`: graphs that were read from files share
    no storages, so that these are unknown.
    """
    alive = alive_while(stage, name, buffered, views)
    return max((size for _, size in alive), default=0)


def alive_while(stage: StageProgram, name: str, buffered: bool = False, views: bool = False) -> list[tuple[Node, int]]:
    """The same while each node of the graph runs."""
    piece = stage.pieces[name]
    kept = {slot for later in LATER[name] if later in stage.pieces for slot in stage.pieces[later].inputs}
    if buffered:
        kept |= {slot for slot in piece.inputs if slot.kind in ARRIVING}
    return _alive(piece, kept, frozenset() if views else _resident(stage))


def peak_bytes(piece: Piece, kept: Set[Slot] = frozenset(), resident: Set[int] = frozenset()) -> int:
    """The same of a graph alone; `kept` are inputs that a later pass reads, `resident` storages that do not count."""
    return max((size for _, size in _alive(piece, kept, resident)), default=0)


def _alive(piece: Piece, kept: Set[Slot], resident: Set[int]) -> list[tuple[Node, int]]:
    graph = piece.module.graph
    holders = dict(zip(graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
    fixed = [node for node, slot in holders.items() if slot.kind in ALIVE or slot == LOSS]
    uncounted = resident | storages_behind([*fixed, *graph.find_nodes(op="get_attr")])
    staying = [*(node for node, slot in holders.items() if slot in kept), *output_values(graph)]
    nodes = list(graph.nodes)
    sizes = alive_bytes(nodes, storages_behind(holders), storages_behind(staying), uncounted)
    return list(zip(nodes, sizes, strict=True))


def _resident(stage: StageProgram) -> set[int]:
    """What a pass saves may be a view of a parameter, which is no input of the pass that reads it."""
    pieces = stage.pieces.values()
    changed = {slot.name for piece in pieces for slot in piece.outputs if slot.kind == "mutation"}
    holders = [
        (n, s) for p in pieces for n, s in zip(p.module.graph.find_nodes(op="placeholder"), p.inputs, strict=True)
    ]
    return storages_behind(node for node, slot in holders if is_resident(slot, changed))
