"""The peak memory of a pass while it runs, from a walk over its graph that tracks which storages are alive."""

from collections.abc import Set

import torch
from torch.fx import Node

from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.split.saved_bytes import LOSS, RESIDENT
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
    """The same of a graph alone; `kept` are inputs that a later pass reads."""
    return _Walk(piece, kept).peak()


class _Walk:
    """One run of a graph that computes only sizes."""

    def __init__(self, piece: Piece, kept: Set[Slot]) -> None:
        self.nodes = list(piece.module.graph.nodes)
        holders = dict(zip(piece.module.graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
        self.sizes = {key: size for node in self.nodes for key, size in _storages(node)}
        fixed = [node for node, slot in holders.items() if slot.kind in ALIVE or slot == LOSS]
        attributes = (node for node in self.nodes if node.op == "get_attr")
        self.uncounted = {key for node in (*fixed, *attributes) for key, _ in _storages(node)}
        staying = [node for node, slot in holders.items() if slot in kept]
        self.staying = {key for node in (*staying, *output_values(piece.module.graph)) for key, _ in _storages(node)}
        self.last_use = {key: i for i, node in enumerate(self.nodes) for key in _touched(node)}
        self.arriving = {key for node in holders for key, _ in _storages(node)}

    def peak(self) -> int:
        alive = self._counted(self.arriving)
        most = now = sum(self.sizes[key] for key in alive)
        for index, node in enumerate(self.nodes):
            makes = node.op == "call_function" and not is_in_place(node.target)
            made = self._counted({key for key, _ in _storages(node)} if makes else set()) - alive
            alive |= made
            now += sum(self.sizes[key] for key in made)
            most = max(most, now)
            dead = {key for key in _touched(node) & alive if self.last_use[key] == index} - self.staying
            alive -= dead
            now -= sum(self.sizes[key] for key in dead)
        return most

    def _counted(self, keys: Set[int]) -> set[int]:
        return set(keys - self.uncounted)


def _storages(node: Node) -> list[tuple[int, int]]:
    """The storages behind a node's value: key and bytes."""
    found: list[torch.Tensor] = tensors_of(node.meta.get("val"))
    return [(storage_key(t), t.untyped_storage().nbytes()) for t in found]


def _touched(node: Node) -> set[int]:
    return {key for each in (node, *node.all_input_nodes) for key, _ in _storages(each)}
