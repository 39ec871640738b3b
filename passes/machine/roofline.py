"""What the operations of a graph take on a machine: the longer of their arithmetic and the bytes
that they move."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from zbcompile.passes.graph.fx import is_getitem, is_view, tensors_of
from zbcompile.passes.graph.process_groups import is_collective, is_wait
from zbcompile.passes.graph.storage import bytes_moved, storages_read
from zbcompile.passes.machine.flops import count_flops
from zbcompile.passes.machine.fusion import fused_kernels, kernel_bytes
from zbcompile.passes.machine.hardware import Hardware
from zbcompile.passes.torch_private import TO_COPY, FakeTensorMode

aten = torch.ops.aten
# Operations that draw random numbers, and those that run no kernel.
RANDOM = frozenset(
    {aten.bernoulli, aten.native_dropout, aten.rand, aten.rand_like, aten.randn_like}
)
NOTHING = frozenset({aten.detach, aten.empty_like, aten.empty, aten.alias})
# multiply-adds in the time of one load: how the efficiency of a tile falls with its edges
EDGE = 16.0


class Shape(NamedTuple):
    """`batch` products of [m, k] by [k, n]."""

    batch: int
    m: int
    n: int
    k: int


def seconds_of(module: GraphModule, hardware: Hardware) -> float:
    """The seconds of one run of a graph."""
    return sum(seconds for _, seconds in kernel_seconds(module, hardware))


def kernel_seconds(module: GraphModule, hardware: Hardware) -> list[tuple[list[Node], float]]:
    """The seconds of each kernel of a graph, with its operations."""
    flops = count_flops(module, FakeTensorMode(allow_non_fake_inputs=True))
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    joined = _dropouts(nodes) if hardware.units else set()
    apart = {
        node
        for node in nodes
        if flops[node] or is_collective(node) or is_wait(node) or node not in joined
    }
    kernels, others = fused_kernels(nodes, apart)
    found = [([node], node_seconds(node, flops[node], hardware)) for node in others]
    return [*found, *((each, joined_seconds(each, hardware)) for each in kernels)]


def joined_seconds(nodes: Sequence[Node], hardware: Hardware) -> float:
    """The seconds of elementwise operations that are one kernel."""
    return _kernel_seconds(kernel_bytes(nodes), _random_numbers(nodes), hardware)


def _dropouts(nodes: Iterable[Node]) -> set[Node]:
    """The operations of dropouts, which are one kernel on a GPU each, and which graphs captured on
    a CPU spell out."""
    masks: set[Node] = set()
    found: set[Node] = set()
    for node in nodes:
        of_mask = any(a in masks or _is_mask(a) for a in node.all_input_nodes)
        if _packet(node) is aten.bernoulli or (
            of_mask and _packet(node) in (TO_COPY.overloadpacket, aten.div)
        ):
            masks.add(node)
        elif of_mask and _packet(node) is aten.mul:
            found.add(node)
    return found | masks


def _is_mask(node: Node) -> bool:
    return any(t.dtype == torch.bool for t in tensors_of(node.meta.get("val")))


def node_seconds(node: Node, flops: int, hardware: Hardware) -> float:
    """The seconds of one operation; `flops` as counted."""
    if (
        is_getitem(node) or is_collective(node) or is_wait(node)
    ):  # exchanges are priced by their channels
        return 0.0
    if is_view(node) or _packet(node) in NOTHING:
        return 0.0
    moved = bytes_moved(node)
    if flops:
        return product_seconds(node, flops, moved, hardware)
    return _kernel_seconds(moved, _random_numbers([node]), hardware)


def _kernel_seconds(moved: float, drawn: int, hardware: Hardware) -> float:
    """A kernel that is bound by its bytes and its random numbers."""
    drawing = drawn / hardware.random if hardware.random else 0.0
    return hardware.launch + drawing + moved / (hardware.bandwidth * hardware.bandwidth_efficiency)


def _random_numbers(nodes: Iterable[Node]) -> int:
    return sum(
        t.numel()
        for node in nodes
        if _packet(node) in RANDOM
        for t in tensors_of(node.meta["val"])[:1]
    )


def product_seconds(node: Node, flops: int, moved: int, hardware: Hardware) -> float:
    """A product of matrices, a convolution or an attention kernel."""
    dtypes = (str(t.dtype).removeprefix("torch.") for t in storages_read(node).values())
    peak = hardware.peak_of(next(dtypes, ""))
    moving = moved / (hardware.bandwidth * hardware.bandwidth_efficiency)
    shape = product_of(node)
    share = hardware.attention_efficiency if shape is None else product_share(shape, hardware)
    arithmetic = flops / (peak * share)
    return hardware.launch + (max(arithmetic, moving) if hardware.overlaps else arithmetic + moving)


def product_share(shape: Shape, hardware: Hardware) -> float:
    """What a product gets of the peak: its sum's length, and the tile that leaves the fewest
    processors idle."""
    long = shape.k / (shape.k + hardware.depth)
    if not hardware.units or not hardware.tiles:
        return hardware.product_efficiency * long
    return (
        hardware.product_efficiency
        * long
        * max(_tiled(shape, tile, hardware) for tile in hardware.tiles)
    )


def _tiled(shape: Shape, tile: Sequence[int], hardware: Hardware) -> float:
    """The share of useful work in the waves of tiles; small tiles read more for each product."""
    (rows, columns), units = tile, hardware.units or 1
    tiles = shape.batch * math.ceil(shape.m / rows) * math.ceil(shape.n / columns)
    useful = shape.batch * shape.m * shape.n / (math.ceil(tiles / units) * units * rows * columns)
    return (
        useful
        * (1 + EDGE * sum(1 / side for side in hardware.tiles[0]))
        / (1 + EDGE * (1 / rows + 1 / columns))
    )


def product_of(node: Node) -> Shape | None:
    """The product of matrices that a node is; None for others. Of several one: of a convolution's
    backward, and of the groups of experts that take turns."""
    name, value = _name(node).rstrip("_"), node.meta["val"]
    given = [
        argument.meta["val"]
        for argument in node.args
        if isinstance(argument, Node) and "val" in argument.meta
    ]
    if name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"):
        one, other = given[-2:]
        one, other = (
            (one if one.ndim > 1 else one[None]),
            (other if other.ndim > 1 else other[:, None]),
        )
        return Shape(math.prod(one.shape[:-2]), one.shape[-2], other.shape[-1], one.shape[-1])
    if name == "convolution":
        return _convolution(given[0].shape, given[1].shape, value.shape, node.args[8])
    if name == "convolution_backward":
        return _convolution(given[1].shape, given[2].shape, given[0].shape, node.args[9])
    if name in ("_grouped_mm", "_scaled_mm"):
        one, other = given[:2]
        return Shape(1, math.prod(one.shape[:-1]), other.shape[-1], one.shape[-1])
    if name in (
        "grouped_mm_fallback",
        "grouped_mm_fallback_backward",
    ):  # one product after the other
        one, other = given[:2]
        return Shape(1, math.ceil(one.shape[0] / other.shape[0]), other.shape[-1], one.shape[-1])
    return None


def _convolution(
    taken: Sequence[int], weight: Sequence[int], made: Sequence[int], groups: Any
) -> Shape:
    return Shape(
        int(groups), made[0] * math.prod(made[2:]), weight[0] // int(groups), math.prod(weight[1:])
    )


def _name(node: Node) -> str:
    return str(getattr(_packet(node), "__name__", node.target))


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)
