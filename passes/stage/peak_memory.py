"""The peak memory of a pass while it runs."""

from collections.abc import Set

from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import most_alive, storages_behind
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
    no storages, so that nobody knows what these are.
    """
    piece = stage.pieces[name]
    kept = {slot for later in LATER[name] if later in stage.pieces for slot in stage.pieces[later].inputs}
    if buffered:
        kept |= {slot for slot in piece.inputs if slot.kind in ARRIVING}
    return peak_bytes(piece, kept, frozenset() if views else _resident(stage))


def peak_bytes(piece: Piece, kept: Set[Slot] = frozenset(), resident: Set[int] = frozenset()) -> int:
    """The same of a graph alone; `kept` are inputs that a later pass reads, `resident` storages that do not count."""
    graph = piece.module.graph
    holders = dict(zip(graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
    fixed = [node for node, slot in holders.items() if slot.kind in ALIVE or slot == LOSS]
    uncounted = resident | storages_behind([*fixed, *graph.find_nodes(op="get_attr")])
    staying = [*(node for node, slot in holders.items() if slot in kept), *output_values(graph)]
    return most_alive(graph.nodes, storages_behind(holders), storages_behind(staying), uncounted)


def _resident(stage: StageProgram) -> set[int]:
    """What a pass saves may be a view of a parameter, which is no input of the pass that reads it."""
    pieces = stage.pieces.values()
    changed = {slot.name for piece in pieces for slot in piece.outputs if slot.kind == "mutation"}
    holders = [
        (n, s) for p in pieces for n, s in zip(p.module.graph.find_nodes(op="placeholder"), p.inputs, strict=True)
    ]
    return storages_behind(node for node, slot in holders if is_resident(slot, changed))
