"""Which values cross each position of the canonical graph, and which need not because any stage can recompute them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.graph.fx import count_uses, is_getitem, is_random
from zbcompile.passes.graph.process_groups import is_collective, is_under_way
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import bytes_behind, is_view, tensors_of
from zbcompile.passes.machine.flops import count_flops
from zbcompile.passes.partition.inside_calls import CallPasses, inside_calls


@dataclass(frozen=True)
class Line:
    """The nodes that belong to exactly one stage, in execution order, and the values alive after each.

    `live[i]` are the values that cross a cut placed after `nodes[i]`; `allowed[i]` says whether a cut may be there.
    `flops` counts every node of the graph, the replicated ones too. `inside` has what operators that stand for calls
    consist of.
    """

    nodes: tuple[Node, ...]
    live: tuple[tuple[Node, ...], ...]
    allowed: tuple[bool, ...]
    flops: Mapping[Node, int]
    inside: Mapping[Node, CallPasses]

    def boundary_bytes(self, position: int) -> int:
        return bytes_behind(self.live[position])


def lay_out_line(canonical: Canonical) -> Line:
    """Lay the graph out as a line of nodes between which it can be cut."""
    inside = inside_calls(canonical.graph)
    counted = {node: each.forward_flops for node, each in inside.items()}
    flops = count_flops(canonical.module, canonical.mode, counted)
    anywhere = replicable(canonical, flops)
    nodes = [n for n in canonical.graph.nodes if n.op == "call_function" and n not in anywhere]
    live = _live_after(nodes, [value for slot, value in canonical.outputs if slot.kind in ("loss", "activation")])
    whole = _inside_an_update(canonical, nodes)
    end = max((i for i, node in enumerate(nodes) if _largest(node) > 1), default=0)  # behind it: the loss, one number
    allowed = [
        i < end and i not in whole and _may_cut(node, crossing)
        for i, (node, crossing) in enumerate(zip(nodes, live, strict=True))
    ]
    return Line(tuple(nodes), tuple(live), tuple(allowed), flops, inside)


def replicable(canonical: Canonical, flops: Mapping[Node, int]) -> set[Node]:
    """Nodes that every stage can compute for itself: made from inputs and constants, or views of a parameter that are
    used once. Eager adds the gradients of a view's uses, and then what it is a view of gets the sum.

    Position ids, masks, rotary tables and casts of a mask then cross no boundary. Nothing with a contraction, nothing
    random, no collective and nothing that a gradient must be summed through is ever computed twice.
    """
    mutated = {("buffer", slot.name) for slot in canonical.captured.outputs if slot.kind == "mutation"}
    makers = {value for slot, value in canonical.outputs if slot.kind == "mutation"}
    found: set[Node] = set()
    for node in canonical.graph.nodes:
        changing = node.op == "placeholder" and (node.meta["slot"].kind, node.meta["slot"].name) in mutated
        resident = node.op in ("get_attr", "placeholder") and not changing
        remade = node.op == "call_function" and _is_cheap(node, flops) and all(a in found for a in node.all_input_nodes)
        if resident or (remade and node not in makers):
            found.add(node)
    return found


def _is_cheap(node: Node, flops: Mapping[Node, int]) -> bool:
    if is_random(node) or is_collective(node) or flops.get(node, 0):
        return False
    return not node.meta["differentiable"] or (is_view(node) and count_uses(node) <= 1)


def _live_after(nodes: list[Node], to_the_end: list[Node]) -> list[tuple[Node, ...]]:
    position = {node: i for i, node in enumerate(nodes)}
    last_use = {node: max((position.get(user, -1) for user in node.users), default=-1) for node in nodes}
    last_use.update({node: len(nodes) - 1 for node in to_the_end})  # the last stage returns the loss
    live: list[tuple[Node, ...]] = []
    current: list[Node] = []
    for i, node in enumerate(nodes):
        current = [n for n in [*current, node] if last_use[n] > i]
        live.append(tuple(current))
    return live


def _inside_an_update(canonical: Canonical, nodes: list[Node]) -> set[int]:
    """The positions between the first node that reads a changing buffer and the last that reads or makes it: spread
    over several stages, some would see stale values."""
    position = {node: i for i, node in enumerate(nodes)}
    holders = {node.meta["slot"]: node for node in canonical.graph.find_nodes(op="placeholder")}
    found: set[int] = set()
    for slot, value in canonical.outputs:
        if slot.kind == "mutation":
            holder = holders.get(Slot("buffer", slot.name))
            readers = list(holder.users) if holder else []
            touching = [position[node] for node in (*readers, value) if node in position]
            found |= set(range(min(touching, default=0), max(touching, default=0)))
    return found


def _largest(node: Node) -> int:
    """Elements of the largest tensor that a node reads or makes."""
    values = (n.meta.get("val") for n in (node, *node.all_input_nodes))
    return max((tensor.numel() for value in values for tensor in tensors_of(value)), default=0)


def _may_cut(node: Node, crossing: tuple[Node, ...]) -> bool:
    """Whether a cut may follow a node: never at a tuple, right after a view or while a collective is under way, and
    only where a gradient can flow back."""
    maker = node.args[0] if is_getitem(node) else node
    if is_view(maker) or any(isinstance(n.meta["val"], tuple | list) for n in crossing):  # type: ignore[arg-type]
        return False
    return any(n.meta["differentiable"] for n in crossing) and not any(map(is_under_way, crossing))


def held_behind(node: Node, on_line: frozenset[Node]) -> list[Node]:
    """The parameters and buffers that a node reads, directly or through what its stage recomputes for itself."""
    found, queue, seen = [], [node], {node}
    while queue:
        for argument in queue.pop().all_input_nodes:
            if argument in seen or argument in on_line:
                continue
            seen.add(argument)
            queue.append(argument)
            if argument.op == "placeholder" and argument.meta["slot"].kind in ("parameter", "buffer"):
                found.append(argument)
    return found
