"""The peak memory of a pass while it runs."""

from collections.abc import Collection, Set

from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import alive_bytes, storages_behind
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.stage.stage_program import StageProgram

RESIDENT = ("parameter", "buffer", "constant", "batch")
LOSS = Slot("tangent", "loss")  # the same factor for every microbatch
LATER = {"F": ("B", "W"), "B": ("W",), "W": (), "BW": ()}
ALIVE = (*RESIDENT, "accumulator")  # before and after, whatever runs


def transient_bytes(stage: StageProgram, name: str, sent: Set[Slot] = frozenset()) -> int:
    """Returns the peak bytes of one microbatch while the pass `name` of `stage` runs.

    Counted are inputs that other passes computed or that messages brought, intermediate values and
    results; not parameters, buffers, gradient buffers and the user's inputs, nor what a kernel
    allocates for itself. A value is freed after its last use, an input only if no later pass reads
    it or a view of it, and it is not among `sent`: a message that is under way keeps it. Saved
    views of a parameter do not count.
    """
    piece = stage.pieces[name]
    graph, arguments = piece.module.graph, piece.arguments
    later = [
        argument
        for kind in LATER[name]
        if kind in stage.pieces
        for argument in stage.pieces[kind].arguments
    ]
    kept = {slot for slot, _ in later} | sent
    fixed = [node for slot, node in arguments if slot.role in ALIVE or slot == LOSS]
    uncounted = resident_storages(stage.pieces.values()) | storages_behind(fixed)
    arriving = storages_behind(node for _, node in arguments)
    staying = storages_behind([*(n for slot, n in arguments if slot in kept), *piece.results])
    staying |= arriving & storages_behind(node for _, node in later)
    return max(alive_bytes([*graph.nodes], arriving, staying, uncounted), default=0)


def resident_storages(pieces: Collection[PassGraph]) -> set[int]:
    """Returns the storages of what outlives a step: a pass may save a view of a parameter, which
    is then no input of the pass that reads it. Buffers that F changes are not among them."""
    changed = {s.name for piece in pieces for s in piece.outputs if s.role == "buffer_update"}
    return storages_behind(
        node
        for piece in pieces
        for slot, node in piece.arguments
        if slot == LOSS
        or (slot.role in RESIDENT and not (slot.role == "buffer" and slot.name in changed))
    )
