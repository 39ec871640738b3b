"""In-place writes after functionalisation: brought into a form that can be split, with the gradients, strides and
random numbers of eager's writes."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.graph.fx import call_like, nodes_behind
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.source_location import source_line
from zbcompile.passes.graph.storage import is_view
from zbcompile.passes.graph.strides import is_dense
from zbcompile.passes.torch_private import fake_mode_of, made_for, written_as

aten = torch.ops.aten
DETACH = aten.detach.default
GRADIENT_LAYOUT = "gradient_layout"


def merge_remade_views(graph: Graph) -> None:
    """Keep one of the equal views that stand for one view of the model: after a write, functional form takes it anew at
    every use. Eager adds the gradients of its uses before those of what it is a view of."""
    last = {made_for(node): node for node in graph.nodes if node.op == "call_function"}
    first: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_view(node):
            continue
        keeper = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if keeper is not node and last[made_for(node)] is not node:
            node.replace_all_uses_with(keeper)
            graph.erase_node(node)


def make_copies_differentiable(graph: Graph) -> None:
    """Replace `aten.copy`, to which a write into a slice is traced, with a cast and an expand: it has no derivative
    below autograd, they do. What is overwritten keeps its part in the gradients, which is zero."""
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        into, value = node.args[:2]
        with graph.inserting_before(node):
            node.replace_all_uses_with(_as_like(graph, node, value, into))
        graph.erase_node(node)


def correct_strided_writes(graph: Graph) -> None:
    """Choose between old and new elements explicitly in `aten.as_strided_scatter`, to which `fill_diagonal_` and writes
    through `as_strided` are traced: 2.11-2.13 give the gradient of what was overwritten, not of what was kept."""
    for node in graph.find_nodes(op="call_function", target=aten.as_strided_scatter.default):
        if written_as(node).startswith("aten.as_strided_scatter"):
            continue  # the model's own call has the same gradient in eager
        base, written = node.args[:2]
        old, new = base.meta["val"], written.meta["val"]
        if not old.is_contiguous():
            raise Refusal.STRIDED_WRITE.error(line=source_line(node))
        with graph.inserting_before(node):
            everywhere = call_like(graph, node, aten.zeros_like.default, (base,), old.bool(), dtype=torch.bool)
            there = call_like(graph, node, aten.ones_like.default, (written,), new.bool(), dtype=torch.bool)
            mask = call_like(graph, node, node.target, (everywhere, there, *node.args[2:]), old.bool())
            node.replace_input_with(base, call_like(graph, node, DETACH, (base,), old))
        with graph.inserting_after(node):
            chosen = call_like(graph, node, aten.where.self, (mask, node, base), node.meta["val"])
        node.replace_all_uses_with(chosen, delete_user_cb=lambda user, chosen=chosen: user is not chosen)


def _as_like(graph: Graph, node: Node, value: Any, into: Any) -> Node:
    """`value` with the dtype, shape and strides of `into`."""
    wanted = into.meta["val"]
    if value.meta["val"].dtype != wanted.dtype:
        value = call_like(graph, node, aten.to.dtype, (value, wanted.dtype), value.meta["val"].to(wanted.dtype))
    if value.meta["val"].shape != wanted.shape:
        shape = list(wanted.shape)
        value = call_like(graph, node, aten.expand.default, (value, shape), value.meta["val"].expand(shape))
    if wanted.ndim and (value.meta["val"].stride() != wanted.stride() or _loses_gradients(node)):
        value = call_like(graph, node, aten.slice_scatter.default, (into, value), wanted)
    elif _loses_gradients(node):
        always = call_like(graph, node, aten.ones_like.default, (into,), wanted.bool(), dtype=torch.bool)
        value = call_like(graph, node, aten.where.self, (always, value, into), wanted)
    return value


def _loses_gradients(copy: Node) -> bool:
    """Whether what a copy overwrites may be differentiable, and is not put back into the rest of a tensor."""
    return not all("scatter" in str(user.target) for user in copy.users) and _trained(copy.args[0])


def _trained(value: Any) -> bool:
    """Whether a value may depend on parameters."""
    behind = nodes_behind([value], lambda node: node.target is not DETACH)
    return any(node.op == "placeholder" and node.meta["slot"].kind == "parameter" for node in behind)


def keep_strides_of_writes(graph: Graph) -> None:
    """Give what an in-place operation makes the strides of what it overwrites: its functional form may have others."""
    changed = False
    for node in list(graph.nodes):
        if changed and node.op == "call_function":
            node.meta["val"] = _inferred(node)
        if _loses_strides(node):
            wanted = node.args[0].meta["val"]
            with graph.inserting_after(node):
                empty = call_like(graph, node, aten.empty_like.default, (node.args[0],), wanted)
            with graph.inserting_after(empty):
                kept = call_like(graph, node, aten.slice_scatter.default, (empty, node), wanted)
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
            changed = True


def mark_written_bases(graph: Graph) -> None:
    """Mark, of each write through a view, the view and what the write leaves of the tensor behind it: in eager, their
    gradients have that tensor's strides; that of the written values is contiguous (2.11-2.13: CopySlices)."""
    made: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and written_as(node).rpartition(".")[0].endswith("_"):
            made.setdefault(made_for(node), []).append(node)
    for nodes in made.values():
        written = [n for n in nodes if f"{str(n.target).rpartition('.')[0]}_" == written_as(n).rpartition(".")[0]]
        if len(nodes) > 1 and written and isinstance(written[0].args[0], Node):
            for node in (nodes[-1], written[0].args[0], written[0]):
                node.meta[GRADIENT_LAYOUT] = "contiguous" if node is written[0] else "own"


def _loses_strides(node: Node) -> bool:
    if written_as(node).rpartition(".")[0] != str(node.target).rpartition(".")[0] + "_":
        return False  # of other operations, strides may depend on data
    before = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
    after = node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.stride() == after.stride():
        return False
    return (before.shape, before.dtype) == (after.shape, after.dtype) and is_dense(before)


def _inferred(node: Node) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
    fakes = [value for value in node.all_input_nodes if isinstance(value.meta["val"], Tensor)]
    if not fakes:
        return node.meta["val"]
    with fake_mode_of(fakes[0].meta["val"]), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def separate_changing_buffers(graph: Graph, outputs: tuple[Slot, ...]) -> None:
    """Make views of a buffer that forward changes views of a copy, since they may be read after the change. A buffer
    whose new value is an input gets a copy of that input, which is an operation with a place in the graph."""
    (results,) = graph.output_node().args
    for slot, value in zip(outputs, results, strict=True):  # type: ignore[arg-type]
        if slot.kind != "mutation":
            continue
        held = Slot("buffer", slot.name)
        for holder in [each for each in graph.find_nodes(op="placeholder") if each.meta["slot"] == held]:
            for view in [user for user in holder.users if is_view(user)]:
                with graph.inserting_before(view):
                    view.replace_input_with(holder, _clone(graph, holder, view))
        if isinstance(value, Node) and value.op == "placeholder":
            with graph.inserting_before(graph.output_node()):
                graph.output_node().replace_input_with(value, _clone(graph, value, value))


def draw_in_memory_order(graph: Graph) -> None:
    """Draw the masks of transposed tensors in memory order, as eager does.
    `bernoulli_`, with which a dropout draws its mask, fills memory in order; `aten.bernoulli.p`, which replaces it,
    works row by row and makes a contiguous tensor. For a transposed tensor the two assign the numbers to different
    elements, so such a mask is drawn in memory order and transposed afterwards."""
    for node in graph.find_nodes(op="call_function", target=aten.bernoulli.p):
        fresh = node.args[0]
        value = fresh.meta["val"]
        if value.is_contiguous() or written_as(node).startswith("aten.bernoulli.p"):
            continue
        order = sorted(range(value.ndim), key=lambda dimension: -value.stride(dimension))
        back = [order.index(dimension) for dimension in range(value.ndim)]
        with graph.inserting_before(node):
            packed = call_like(graph, node, aten.permute.default, (fresh, order), value.permute(order))
            drawn = call_like(graph, node, aten.bernoulli.p, (packed, *node.args[1:]), packed.meta["val"])
            node.replace_all_uses_with(call_like(graph, node, aten.permute.default, (drawn, back), value))
        graph.erase_node(node)


def _clone(graph: Graph, value: Node, source: Node) -> Node:
    return call_like(graph, source, aten.clone.default, (value,), value.meta["val"])
