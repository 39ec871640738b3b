"""The split: a stage's joint graph becomes F, B (input gradients), W (weight gradients) and BW (both at once).

F is what the stage's outputs need. Of the rest, B is what the input gradients need and W what remains, improved by
`zbcompile.passes.split.weight_cut`. A stage that begins with parameters (an embedding, the first layer) has no
input gradient; the gradient of the first activation made from them is a proxy for it, so that the B and W of a first
stage balance like those of a middle stage.

What the pieces take and make, by the kinds of their slots (`zbcompile.passes.graph.roles`):

    stage   piece  takes                                 makes
    first   F      input, parameter, buffer              activation, saved, mutation
            B      parameter, saved, tangent             saved
            W      input, saved                          gradient
            BW     input, parameter, saved, tangent      gradient
    middle  F      activation, parameter                 activation, saved
            B      activation, parameter, saved, tangent input_gradient, saved
            W      saved                                 gradient
            BW     activation, parameter, saved, tangent input_gradient, gradient
    last    F      activation, parameter, input          loss, saved
            B      parameter, input, saved, tangent      input_gradient, saved
            W      saved                                 gradient
            BW     parameter, input, saved, tangent      input_gradient, gradient

These are the rows of a small model (`tests/passes/split/test_signatures.py`). Any stage may have buffers and the user's
inputs, and make outputs of the model and checks, where the model has them; B, W and BW read again whatever F was given
(input, activation, parameter, buffer). The tangent of the last stage is that of the loss.
"""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from zbcompile.passes.graph.fx import is_getitem, is_random, operations_behind
from zbcompile.passes.graph.process_groups import is_collective
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.split.joint_graph import Joint
from zbcompile.passes.split.saved_bytes import Crossing, crossing_of
from zbcompile.passes.split.simplify import copy_joint
from zbcompile.passes.split.subgraphs import Assignment, Piece, extract, share_views
from zbcompile.passes.split.weight_cut import cut_weight, is_cheap

_MASK = 10  # position of output_mask in a convolution's backward: (gradient of input, of weight, of bias)


@dataclass(frozen=True)
class Improvement:
    """What the split did beyond the dependency closure: the number of operations it moved, and the change in bytes
    between F and B (`kept`) and between B and W (`residue`)."""

    what: str
    operations: int
    kept: int
    residue: int


@dataclass(frozen=True)
class Split:
    """The four pieces of a stage, in canonical form (gradients are outputs; nothing is accumulated yet)."""

    joint: Joint
    forward: Piece
    backward: Piece
    weight: Piece
    fused: Piece
    crossing: Crossing
    improvements: tuple[Improvement, ...]


def split(joint: Joint) -> Split:
    """Split the joint graph of a stage. B then W compute the same bits as BW.

    Every value is computed in exactly one of F, B and W, but for views.
    """
    plain = closure(joint)
    joint = copy_joint(joint)
    convolutions = cut_convolutions(joint.module.graph)
    cut = closure(joint)
    early = cut_weight(cut)
    lean = apply(cut, early)
    steps = [
        _improvement("convolution backwards cut", convolutions, plain, cut),
        _improvement("cheap operations of W computed in B", len(early), cut, lean),
    ]
    final = share_views(lean)
    forward, backward, weight, fused = (extract(final, name) for name in ("F", "B", "W", "BW"))
    merge_convolutions(fused.module.graph)
    fused.module.recompile()
    done = tuple(step for step in steps if step.operations)
    return Split(joint, forward, backward, weight, fused, crossing_of(final), done)


def _improvement(what: str, operations: int, before: Assignment, after: Assignment) -> Improvement:
    old, new = crossing_of(before), crossing_of(after)
    return Improvement(what, operations, new.kept - old.kept, new.residue - old.residue)


def closure(joint: Joint) -> Assignment:
    """The split by dependency closure alone."""
    forward = forward_nodes(joint)
    everything = needed_nodes(joint, lambda slot: slot.kind in ("gradient", "input_gradient"))
    early = needed_nodes(joint, lambda slot: slot.kind == "input_gradient")
    proxies = needed_nodes(joint, lambda slot: slot.kind == "virtual_gradient")
    early |= operations_behind(node for node in proxies if not is_cheap(node) and node not in forward)
    inserted = [node for node in everything if "recomputed" in node.meta]  # by the recompute pass: all of it in B
    early |= operations_behind(inserted)
    early |= operations_behind(node for node in everything if is_collective(node))  # W waits for no other rank
    backward = _close(early - forward, joint) & everything
    return _assign(joint, forward, backward, everything - forward - backward)


def forward_nodes(joint: Joint) -> set[Node]:
    """The nodes that F computes: the stage's outputs with all that they need, and every random number, which eager
    draws whether or not it is used."""
    draws = operations_behind(node for node in joint.module.graph.nodes if is_random(node))
    return _close(needed_nodes(joint, lambda slot: slot in joint.stage.outputs) | draws, joint)


def _assign(joint: Joint, forward: Set[Node], backward: Set[Node], weight: Set[Node]) -> Assignment:
    return Assignment(joint, {"F": forward, "B": backward, "W": weight, "BW": backward | weight})


def apply(plain: Assignment, early: Set[Node]) -> Assignment:
    """`plain` with the operations in `early` of W computed in B."""
    joint, nodes = plain.joint, plain.nodes
    backward = nodes["B"] | _close(operations_behind(early) & nodes["W"], joint)
    return _assign(joint, nodes["F"], backward, nodes["W"] - backward)


def needed_nodes(joint: Joint, wanted: Callable[[Slot], bool]) -> set[Node]:
    """The dependency closure of the chosen outputs, placeholders excluded."""
    return operations_behind(node for slot, node in joint.outputs if wanted(slot))


def _close(nodes: Set[Node], joint: Joint) -> set[Node]:
    """Add the getitems of nodes with several outputs: the parts of a tuple are kept, never the tuple."""
    return {*nodes, *(n for n in joint.module.graph.nodes if is_getitem(n) and n.args[0] in nodes)}


def cut_convolutions(graph: Graph) -> int:
    """Cut every backward of a convolution that makes the input's gradient and another one; returns how many.

    Autograd computes the gradients of input, weight and bias in one call, so without the cut every convolution's weight
    gradient would be computed in B. The two calls compute the same bits as the one.
    """
    found = [n for n in graph.nodes if _is_convolution_backward(n) and n.args[_MASK][0] and any(n.args[_MASK][1:])]
    for node in found:
        _, weight, bias = node.args[_MASK]
        with graph.inserting_after(node):
            later = graph.call_function(node.target, _masked(node, [False, weight, bias]))
        later.meta = _meta(node, (False, weight, bias))
        for user in [u for u in node.users if is_getitem(u) and u.args[1] != 0]:
            user.args = (later, user.args[1])
        node.args = _masked(node, [True, False, False])
        node.meta = _meta(node, (True, False, False))
    return len(found)


def merge_convolutions(graph: Graph) -> None:
    """Undo `cut_convolutions` where nothing is split (BW): merge calls that differ only in their masks, since one call
    shares the reordering of the output gradient."""
    first: dict[tuple[Any, ...], Node] = {}
    for node in [n for n in graph.nodes if _is_convolution_backward(n)]:
        arguments = tuple(tuple(a) if isinstance(a, list) else a for a in node.args[:_MASK])
        keeper = first.setdefault(arguments, node)
        if keeper is not node and not any(a and b for a, b in _masks(keeper, node)):
            _merge(graph, keeper, node)


def _merge(graph: Graph, keeper: Node, node: Node) -> None:
    values = [a if a is not None else b for a, b in zip(keeper.meta["val"], node.meta["val"], strict=True)]
    mask = [a or b for a, b in _masks(keeper, node)]
    node.replace_all_uses_with(keeper)
    graph.erase_node(node)
    keeper.args = _masked(keeper, mask)
    keeper.meta = {key: value for key, value in keeper.meta.items() if key != "pass"} | {"val": tuple(values)}


def _is_convolution_backward(node: Node) -> bool:
    return node.target is torch.ops.aten.convolution_backward.default


def _masks(one: Node, other: Node) -> Iterator[tuple[Any, Any]]:
    return zip(one.args[_MASK], other.args[_MASK], strict=True)  # type: ignore[arg-type]


def _masked(node: Node, mask: list[Any]) -> tuple[Any, ...]:
    return (*node.args[:_MASK], mask)


def _meta(node: Node, mask: tuple[Any, ...]) -> dict[str, Any]:
    """The values that remain under `mask`."""
    values = tuple(value if wanted else None for value, wanted in zip(node.meta["val"], mask, strict=True))
    return {**node.meta, "val": values, "pass": "split"}
