"""What holds of any graph: its order, its roles, its values, its collectives."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.graph.fx import is_getitem
from zbcompile.passes.graph.process_groups import is_under_way, is_wait
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.torch_names import type_text
from zbcompile.passes.torch_private import is_in_place
from zbcompile.passes.verification.graph_views import GraphView
from zbcompile.passes.verification.rule import Break, graph_rule

_HELD = frozenset({"parameter", "buffer", "constant", "input", "activation"})
_BACKWARD = _HELD | {"tangent", "saved"}
_STAGE = frozenset({"activation", "mutation", "loss", "output", "check", "fits"})
# By kind of graph: the kinds of its inputs and of its outputs. The passes of a vocabulary shard mix them.
_KINDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "model": (_HELD, _STAGE),
    "stage": (_HELD, _STAGE),
    "joint": (_HELD | {"tangent"}, _STAGE | {"gradient", "input_gradient", "virtual_gradient"}),
    "F": (_HELD, _STAGE | {"saved"}),
    "B": (_BACKWARD, frozenset({"input_gradient", "saved"})),
    "W": (_BACKWARD | {"accumulator"}, frozenset({"gradient"})),
    "BW": (_BACKWARD | {"accumulator"}, frozenset({"gradient", "input_gradient"})),
}


@graph_rule("inputs come first, and every operation comes after all that it reads")
def operations_in_order(view: GraphView) -> Iterator[Break]:
    seen: set[Node] = set()
    computing = False
    for node in view.nodes:
        late = [argument.name for argument in node.all_input_nodes if argument not in seen]
        if late:
            yield Break(f"reads {', '.join(late)}, which is computed later", node)
        if node.op == "placeholder" and computing:
            yield Break("is an input after the first operation", node)
        computing = computing or node.op == "call_function"
        seen.add(node)


@graph_rule("a graph is made of inputs, calls of functions, its own attributes and one output")
def calls_only(view: GraphView) -> Iterator[Break]:
    for node in view.nodes:
        if node.op not in ("placeholder", "call_function", "get_attr", "output"):
            yield Break(f"is a {node.op}", node)
        if node.op == "get_attr" and not _has(view.module, str(node.target)):
            yield Break(f"refers to {node.target}, which the graph's module lacks", node)


def _has(module: torch.nn.Module, path: str) -> bool:
    try:
        attrgetter(path)(module)
    except AttributeError:
        return False
    return True


@graph_rule("every input and every result has exactly one role")
def roles_complete(view: GraphView) -> Iterator[Break]:
    holders = view.module.graph.find_nodes(op="placeholder")
    if len(holders) != len(view.inputs):
        yield Break(f"{len(holders)} inputs have {len(view.inputs)} roles")
    (results,) = view.module.graph.output_node().args
    count = len(results) if isinstance(results, tuple | list) else 1
    if count != len(view.outputs):
        yield Break(f"{count} results have {len(view.outputs)} roles")


@graph_rule('an input\'s meta["slot"] is the role that the graph gives it')
def roles_on_inputs(view: GraphView) -> Iterator[Break]:
    for slot, node in view.arriving:
        if node.meta.get("slot") != slot:
            yield Break(f"is called {node.meta.get('slot', 'nothing')} and has the role {slot}", node)


@graph_rule("no two inputs, and no two results, have the same role (except the gradients of a parameter's uses)")
def roles_unique(view: GraphView) -> Iterator[Break]:
    for pairs in (view.arriving, view.leaving):
        first: dict[Slot, Any] = {}
        for slot, value in pairs:
            if slot in first and slot.kind not in ("gradient", "output"):
                node = value if isinstance(value, Node) else None
                yield Break(f"has the role {slot}, as {getattr(first[slot], 'name', first[slot])} has", node)
            first[slot] = value


@graph_rule("a graph's roles are of the kinds that its pass may read and return")
def roles_allowed(view: GraphView) -> Iterator[Break]:
    inputs, outputs = _KINDS.get(view.kind, (None, None))
    for allowed, pairs, verb in ((inputs, view.arriving, "reads"), (outputs, view.leaving, "returns")):
        for slot, value in pairs:
            if allowed is not None and slot.kind not in allowed and isinstance(value, Node):
                yield Break(f"is a {slot}, which {view.title} never {verb}", value)


@graph_rule('every input and every operation has its fake value in meta["val"]')
def values_present(view: GraphView) -> Iterator[Break]:
    for node in view.nodes:
        if node.op in ("placeholder", "call_function") and "val" not in node.meta and not _is_left_out(node):
            yield Break("has no value", node)


def _is_left_out(node: Node) -> bool:
    """Whether a node is a part that its tuple lacks: the gradient of a frozen bias."""
    return is_getitem(node) and node.args[0].meta["val"][node.args[1]] is None  # type: ignore[union-attr, index]


@graph_rule("a part of a tuple has the form that the tuple gives it")
def parts_fit(view: GraphView) -> Iterator[Break]:
    for node in view.calls:
        whole = node.args[0].meta.get("val") if is_getitem(node) else None  # type: ignore[union-attr]
        if isinstance(whole, tuple | list):
            part = whole[node.args[1]]  # type: ignore[index]
            if not _is_left_out(node) and form_of(part) != form_of(node.meta.get("val")):
                yield Break(f"is {form_of(node.meta.get('val'))}, and part {node.args[1]} {form_of(part)}", node)


@graph_rule("a collective is waited for in the graph that starts it, and its result is not read before")
def collectives_waited(view: GraphView) -> Iterator[Break]:
    for node in view.calls:
        if is_wait(node) and not any(map(_is_started, node.all_input_nodes)):
            yield Break("waits for a collective that this graph does not start", node)
        if _is_started(node):
            for user in node.users:
                if not (is_wait(user) or is_getitem(user)):
                    yield Break(f"is read by {user.name} before anything waits for it", node)


def _is_started(node: Node) -> bool:
    """Whether a node is the result, or a part of it, of a collective under way."""
    return is_under_way(node.args[0] if is_getitem(node) else node)  # type: ignore[arg-type]


@graph_rule("no operation writes into what it reads")
def nothing_in_place(view: GraphView) -> Iterator[Break]:
    for node in view.calls:
        if is_in_place(node.target):
            yield Break(f"calls {node.target}", node)


def form_of(value: Any) -> str:
    """Dtype and shape of a value, as text; its type if it is no tensor."""
    return " ".join(type_text(t) for t in tensors_of(value)) or repr(type(value).__name__)
