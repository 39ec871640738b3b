"""The peak memory of a pass while it runs."""

from collections.abc import Iterable, Mapping

from torch.fx import Node

from zbcompile.passes.exported.stage.pass_graph import (
    ACCUMULATOR,
    BATCH,
    BUFFER,
    CONSTANT,
    PARAMETER,
    SAVED,
    TANGENT,
    PassGraph,
    Slot,
)
from zbcompile.passes.exported.step_graph import tensors_of
from zbcompile.passes.exported.torch_private import storage_key

# Inputs that are in memory before and after the pass, whatever it does.
RESIDENT = (PARAMETER, BUFFER, CONSTANT, BATCH, TANGENT, ACCUMULATOR)


def peak_bytes(graph: PassGraph, kept_inputs: Iterable[Slot] = ()) -> int:
    """Returns the most bytes of one microbatch that are alive at once while a pass runs.

    Counted are the inputs that the pass receives, what it computes on its way and what it returns;
    not parameters, buffers, gradient buffers and the batch, nor the workspace of a kernel. A value
    is freed after its last use.

    Args:
        kept_inputs: Inputs that stay alive until the pass ends, such as saved values that a later
            pass reads, or messages in a receive buffer.
    """
    kept = set(kept_inputs)
    holders = list(zip(graph.inputs, graph.placeholders, strict=True))
    resident = _storages(node for slot, node in holders if slot.role in RESIDENT)
    attributes = graph.module.graph.find_nodes(op="get_attr")
    resident |= _storages(attributes)
    sizes = {
        key: size
        for key, size in _storages(graph.module.graph.nodes).items()
        if key not in resident
    }
    staying = _storages(node for slot, node in holders if slot in kept)
    staying |= _storages(node for node in graph.results if node is not None)
    last_use: dict[int, Node] = {}
    for node in graph.module.graph.nodes:
        for value in (node, *node.all_input_nodes):
            last_use.update(dict.fromkeys(_storages([value]), node))
    alive = {key for _, node in holders for key in _storages([node]) if key in sizes}
    current = peak = sum(sizes[key] for key in alive)
    for node in graph.calls:
        for key in _storages([node]):
            if key in sizes and key not in alive:
                alive.add(key)
                current += sizes[key]
        peak = max(peak, current)
        for value in (node, *node.all_input_nodes):
            for key in _storages([value]):
                if key in alive and key not in staying and last_use[key] is node:
                    alive.discard(key)
                    current -= sizes[key]
    return peak


def stage_peaks(passes: Mapping[str, PassGraph]) -> dict[str, int]:
    """Returns the peak of each pass of one stage, given by kind.

    Saved values that a later pass reads as well stay alive.
    """
    peaks = {}
    for kind, graph in passes.items():
        later = [other for name, other in passes.items() if name in _LATER.get(kind, ())]
        kept = {slot for other in later for slot in other.inputs if slot.role == SAVED}
        peaks[kind] = peak_bytes(graph, kept)
    return peaks


_LATER = {"F": ("B", "W", "BW"), "B": ("W",)}


def _storages(nodes: Iterable[Node]) -> dict[int, int]:
    """Returns the bytes of the storages behind some values."""
    return {
        storage_key(tensor): int(tensor.untyped_storage().nbytes())
        for node in nodes
        for tensor in tensors_of(node)
    }
