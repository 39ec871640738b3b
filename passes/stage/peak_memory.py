"""The peak memory of a pass while it runs."""

from collections.abc import Iterator, Set

from torch.fx import Node

from zbcompile.passes.graph.fx import output_values
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
    later = [
        holder
        for later_kind in LATER[name]
        if later_kind in stage.pieces
        for holder in _holders(stage.pieces[later_kind])
    ]
    inputs_of_later = {slot for slot, _ in later} | sent
    read_later = storages_behind(node for _, node in later)
    return peak_bytes(piece, inputs_of_later, _resident(stage), read_later)


def peak_bytes(
    piece: PassGraph,
    inputs_of_later: Set[Slot] = frozenset(),
    resident: Set[int] = frozenset(),
    read_later: Set[int] = frozenset(),
) -> int:
    """Returns the peak bytes of a graph. `inputs_of_later` are inputs that a later pass reads,
    `resident` storages that do not count, and `read_later` storages that stay if they arrive."""
    graph = piece.module.graph
    holders = [*_holders(piece)]
    fixed = [node for slot, node in holders if slot.role in ALIVE or slot == LOSS]
    uncounted = resident | storages_behind([*fixed, *graph.find_nodes(op="get_attr")])
    staying = storages_behind(
        [*(node for slot, node in holders if slot in inputs_of_later), *output_values(graph)]
    )
    arriving = storages_behind(node for _, node in holders)
    sizes = alive_bytes([*graph.nodes], arriving, staying | (arriving & read_later), uncounted)
    return max(sizes, default=0)


def _holders(piece: PassGraph) -> Iterator[tuple[Slot, Node]]:
    return zip(piece.inputs, piece.module.graph.find_nodes(op="placeholder"), strict=True)


def _resident(stage: StageProgram) -> set[int]:
    """Returns the storages of what outlives a step: a pass may save a view of a parameter, which
    is then no input of the pass that reads it."""
    pieces = stage.pieces.values()
    outputs = [slot for piece in pieces for slot in piece.outputs]
    changed = {slot.name for slot in outputs if slot.role == "buffer_update"}
    holders = (holder for piece in pieces for holder in _holders(piece))
    return storages_behind(node for slot, node in holders if is_resident(slot, changed))


def is_resident(slot: Slot, changed: Set[str]) -> bool:
    """Returns True for an input that outlives a step; `changed` are the buffers that F changes."""
    if slot.role == "buffer":
        return slot.name not in changed
    return slot.role in RESIDENT or slot == LOSS
