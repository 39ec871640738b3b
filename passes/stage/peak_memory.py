"""The peak memory of a pass while it runs."""

from collections.abc import Set

from torch.fx import Node

from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import storages_behind, tensors_of
from zbcompile.passes.split.saved_bytes import LOSS, RESIDENT, keys_of
from zbcompile.passes.split.subgraphs import LATER, Piece
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_private import is_in_place, storage_key

ARRIVING = ("activation", "tangent")  # from other stages
ALIVE = (*RESIDENT, "accumulator")  # before and after, whatever runs


def transient_bytes(stage: StageProgram, name: str, buffered: bool = False) -> int:
    """The most bytes of one microbatch that are alive at once while the pass `name` of `stage` runs.

    Counted are what waited for the pass or arrives for it, what it makes on its way and what it returns; not
    parameters, buffers, gradient buffers and the user's inputs, nor what a kernel allocates for itself. A value is
    freed after its last use; an input only if no later pass reads it, and, where messages are `buffered`, what arrived
    not before the pass ends.
    """
    piece = stage.pieces[name]
    kept = {slot for later in LATER[name] if later in stage.pieces for slot in stage.pieces[later].inputs}
    if buffered:
        kept |= {slot for slot in piece.inputs if slot.kind in ARRIVING}
    return peak_bytes(piece, kept)


def peak_bytes(piece: Piece, kept: Set[Slot] = frozenset()) -> int:
    """The same of a graph alone; `kept` are inputs that a later pass reads. A walk over the graph that tracks which
    storages are alive."""
    nodes = list(piece.module.graph.nodes)
    holders = dict(zip(piece.module.graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
    sizes = {storage_key(t): t.untyped_storage().nbytes() for n in nodes for t in tensors_of(n.meta.get("val"))}
    fixed = [node for node, slot in holders.items() if slot.kind in ALIVE or slot == LOSS]
    uncounted = storages_behind([*fixed, *(node for node in nodes if node.op == "get_attr")])
    staying = storages_behind(
        [*(node for node, slot in holders.items() if slot in kept), *output_values(piece.module.graph)]
    )
    last_use = {key: i for i, node in enumerate(nodes) for key in _touched(node)}
    alive = storages_behind(holders) - uncounted
    most = now = sum(map(sizes.__getitem__, alive))
    for index, node in enumerate(nodes):
        if node.op == "call_function" and not is_in_place(node.target):
            made = keys_of(node) - uncounted - alive
            alive |= made
            now += sum(map(sizes.__getitem__, made))
            most = max(most, now)
        dead = {key for key in _touched(node) & alive if last_use[key] == index} - staying
        alive -= dead
        now -= sum(map(sizes.__getitem__, dead))
    return most


def _touched(node: Node) -> set[int]:
    return storages_behind((node, *node.all_input_nodes))
