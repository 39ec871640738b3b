"""What holds of the model's graph after each canonicalisation, and of the stages that it is cut into."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.graph.process_groups import group_of
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import is_view, tensors_of
from zbcompile.passes.partition.stage_graphs import Stage
from zbcompile.passes.torch_private import ASSERTIONS
from zbcompile.passes.verification.graph_rules import form_of
from zbcompile.passes.verification.graph_views import GraphView, graphs_of
from zbcompile.passes.verification.rule import Break, graph_rule, rule

aten = torch.ops.aten


@graph_rule("shapes are static, so no operation checks them")
def no_runtime_checks(view: GraphView) -> Iterator[Break]:
    yield from (Break(f"calls {node.target}", node) for node in view.calls if node.target in ASSERTIONS)


@graph_rule("no operation is aten.copy, which has no derivative")
def copies_differentiable(view: GraphView) -> Iterator[Break]:
    yield from (Break("calls it", node) for node in view.calls if node.target is aten.copy.default)


@graph_rule("no view of a buffer outlives a change of the buffer, and its new value is computed by an operation")
def changing_buffers_separate(view: GraphView) -> Iterator[Break]:
    changing = {slot.name: value for slot, value in view.leaving if slot.kind == "mutation"}
    for slot, node in view.arriving:
        if slot.kind == "buffer" and slot.name in changing:
            views = [user for user in node.users if is_view(user) and user.target is not aten.clone.default]
            yield from (Break(f"is a view of buffer {slot.name}", user) for user in views)
    for name, value in changing.items():
        if isinstance(value, Node) and value.op == "placeholder":
            yield Break(f"is an input, and the new value of buffer {name}", value)


@graph_rule("every result is read, except random draws")
def nothing_unused(view: GraphView) -> Iterator[Break]:
    for node in view.nodes:
        if not node.users and node.op != "output" and not is_random(node):
            yield Break("is never read", node)


@rule("a collective's group has a name of the model's graph, which lists this process's names of them")
def groups_named(made: Any, before: Any) -> Iterator[Break]:
    captured = made.captured if isinstance(made, Canonical) else made
    for view in graphs_of(made):
        for node in view.calls:
            if group_of(node) not in (None, *captured.groups):
                yield Break(f"names the group {group_of(node)}", node, view.title)


@graph_rule('meta["differentiable"] says of every operation whether a gradient passes through it')
def differentiability_known(view: GraphView) -> Iterator[Break]:
    yield from (Break("lacks it", node) for node in view.calls if "differentiable" not in node.meta)


@rule("a stage receives, in this order and form, what other stages send it")
def boundaries_agree(made: Sequence[Stage], before: Any) -> Iterator[Break]:
    views = list(graphs_of(tuple(made)))
    for first, second in pairwise(views):
        sent = [(slot, node) for slot, node in first.leaving if slot.kind == "activation"]
        received = [(slot, node) for slot, node in second.arriving if slot.kind == "activation"]
        if [slot for slot, _ in sent] != [slot for slot, _ in received]:
            yield Break(f"receives {_names(received)}, and {first.title} sends {_names(sent)}", None, second.title)
        for (slot, one), (_, other) in zip(sent, received, strict=False):
            if _layout(one) != _layout(other):
                yield Break(f"receives {slot.name} as {_layout(other)}, sent as {_layout(one)}", other, second.title)


def _names(pairs: Sequence[tuple[Slot, Any]]) -> str:
    return ", ".join(slot.name for slot, _ in pairs) or "nothing"


def _layout(node: Node) -> str:
    return f"{form_of(node.meta.get('val'))} {[tensor.stride() for tensor in tensors_of(node.meta.get('val'))]}"


@rule("one stage, the last that computes it, returns the loss, and each changed buffer is changed by one stage")
def results_once(made: Sequence[Stage], before: Any) -> Iterator[Break]:
    first: dict[Slot, str] = {}
    for view in graphs_of(tuple(made)):
        for slot, node in view.leaving:
            if slot in first and slot.kind in ("loss", "mutation"):
                yield Break(f"returns {slot}, as {first[slot]} does", node, view.title)
            first.setdefault(slot, view.title)
    for slot in before.captured.outputs if isinstance(before, Canonical) else ():
        if slot.kind != "activation" and slot not in first and slot.kind != "output":
            yield Break(f"no stage returns {slot}")


@rule("every random number of the model is drawn on exactly one stage, in the model's order")
def draws_kept(made: Sequence[Stage], before: Any) -> Iterator[Break]:
    wanted = [(node.target, form_of(node.meta.get("val"))) for node in before.graph.nodes if is_random(node)]
    drawn = [(node, view.title) for view in graphs_of(tuple(made)) for node in view.calls if is_random(node)]
    for i, (node, title) in enumerate(drawn):
        if i >= len(wanted) or (node.target, form_of(node.meta.get("val"))) != wanted[i]:
            yield Break(f"draws {node.target} out of order", node, title)
    if len(drawn) < len(wanted):
        yield Break(f"{len(wanted) - len(drawn)} of {len(wanted)} draws are on no stage")
