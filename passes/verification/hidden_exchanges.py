"""Exchanges that no gradient passes, known to be right by what is done with their results: counts that say which rows
have come from where, the largest value and the sum of a softmax over the ranks, sums inside of an autograd.Function."""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch.fx import Node

from zbcompile.passes.graph.fx import is_getitem
from zbcompile.passes.graph.process_groups import group_of, is_wait
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.torch_private import GROUPED_MM, TO_COPY, UNSAFE_VIEW
from zbcompile.passes.verification.exchanges import What
from zbcompile.passes.verification.value_kinds import PlacementFault, ValueKinds, aten, operands_of

Trips = frozenset[bool]  # of the ranks' own values that a value is made of: whether an all-to-all has moved them

_PICKS = {  # rows by places, which are whole numbers
    *(aten.index, aten.index_select, aten.index_copy, aten.index_add, aten.index_put),
    *(aten.gather, aten.scatter, aten.scatter_add, GROUPED_MM),
}
_SAME = {  # the same numbers
    *(aten.view, aten.clone, aten.detach, aten.alias, aten.unsqueeze, aten.squeeze, aten.expand),
    *(TO_COPY.overloadpacket, UNSAFE_VIEW.overloadpacket),
}
_SCALES = {aten.mul, aten.div}
_NEEDS_WHOLE = {aten.log: 0, aten.reciprocal: 0, aten.div: 1}  # which argument must not be a part of a sum
REMEDIES: Mapping[str, str] = {  # by the first word of what is wrong
    "picks": "Exchange both of them, or none.",
    "counts": "Add it behind the sum, or divide it by the number of ranks.",
    "adds": "Subtract the largest value of all ranks: all_reduce it first.",
    "uses": "Sum it over the ranks first.",
}


def hidden_faults(values: ValueKinds, trips: MutableMapping[str, Trips]) -> Iterator[PlacementFault]:
    """Yields what is wrong with such exchanges in a stage. `trips` has those of the activations of the stages before,
    and gets those of this one."""
    yield from _misplaced_rows(values, trips)
    yield from _repeated_terms(values)
    yield from _broken_softmax(values)


def _misplaced_rows(values: ValueKinds, trips: MutableMapping[str, Trips]) -> Iterator[PlacementFault]:
    """Rows at places that are those of other rows: an all-to-all has moved one of the two only."""
    given = {n: s for s, n in values.flow.inputs if s.kind in ("input", "activation")}
    found: dict[Node, Trips] = {}
    for node, kind in values.of.items():
        operands = operands_of(node)
        rows = frozenset[bool]().union(*(found[each] for each in operands if _is_floating(each)))
        places = frozenset[bool]().union(*(found[each] for each in operands if not _is_floating(each)))
        if _packet(node) in _PICKS and {len(rows), len(places), len(rows | places) - 1} == {1}:
            yield PlacementFault(
                "picks rows by the places of others: an all-to-all has moved only one of the two", node
            )
        own = trips.get(given[node].name, frozenset([False])) if node in given else rows | places
        moved = frozenset(not each for each in own) if _exchange(values, node) == "permute" else own
        found[node] = moved if kind == "differing" else frozenset()
    trips.update({slot.name: found[node] for slot, node in values.flow.outputs if slot.kind == "activation"})


def _repeated_terms(values: ValueKinds) -> Iterator[PlacementFault]:
    """Sums over the ranks of a rank's own values with those of all added before, without a factor."""
    for node in values.of:
        given: Any = _origin(node.all_input_nodes[0]) if _exchange(values, node) in ("sum", "scatter") else None
        if _packet(given) in (aten.add, aten.sub):
            terms = [_origin(each) for each in given.all_input_nodes]
            kinds = {values.of[each] for each in terms if each in values.data and _packet(each) not in _SCALES}
            if kinds == {"equal", "differing"}:
                yield PlacementFault(
                    "counts what all ranks have once for each: it is added to a rank's part before the sum", node
                )


def _broken_softmax(values: ValueKinds) -> Iterator[PlacementFault]:
    """Exponentials of a rank's part, less the largest of all ranks, whose sum stays that of the rank; or less its own
    largest, and added up over the ranks."""
    for node in values.of:
        shifted: Any = _origin(node.args[0]) if _packet(node) is aten.exp else None
        if _packet(shifted) is aten.sub:
            part, largest = (_origin(each) for each in shifted.args[:2])
            exchanged = _exchange(values, largest) == "largest"
            top = _origin(largest.args[0]) if exchanged else largest
            own = _packet(top) in (aten.amax, aten.max) and _origin(top.args[0]) is part
            if own and values.of[part] == "differing":
                sums = [each for each in node.users if _packet(each) is aten.sum and _over(each) == _over(top)]
                yield from (fault for each in sums for fault in _misused(values, each, exchanged))


def _misused(values: ValueKinds, total: Node, exchanged: bool) -> Iterator[PlacementFault]:
    """What is wrong with the uses of a rank's sum; `exchanged`: what was subtracted is the largest of all ranks."""
    queue = [(total, user) for user in total.users]
    for part, user in queue:
        packet, exchange = _packet(user), _exchange(values, user)
        if exchange == "sum" and not exchanged:
            yield PlacementFault("adds up exponentials from which each rank has subtracted its own largest value", user)
        elif exchanged and packet in _NEEDS_WHOLE and user.args[_NEEDS_WHOLE[packet]] is part:
            yield PlacementFault(
                "uses a rank's sum of exponentials, less the largest value of all ranks, as the whole", user
            )
        elif packet in (_SAME | {aten.add} | ({aten.mul} if exchanged else set())):
            queue += [(user, each) for each in user.users]


def _origin(value: Any) -> Any:
    """The operation that has computed numbers which are only laid out since."""
    while isinstance(value, Node) and (_packet(value) in _SAME or is_wait(value) or is_getitem(value)):
        value = value.args[0]
    return value


def _packet(node: Any) -> Any:
    return getattr(getattr(node, "target", None), "overloadpacket", None)


def _exchange(values: ValueKinds, node: Any) -> What | None:
    """What a collective along the dimension does; None for all other operations."""
    if not isinstance(node, Node) or group_of(node) != values.dimension:
        return None
    exchange = values.exchange(node)
    return None if exchange is None else exchange.what


def _over(reduction: Node) -> set[int]:
    """The dimensions that a reduction is taken over."""
    count = tensors_of(reduction.all_input_nodes[0].meta["val"])[0].ndim
    given: Any = reduction.args[1] if len(reduction.args) > 1 else None
    return {each % count for each in ([given] if isinstance(given, int) else given or range(count))}


def _is_floating(node: Node) -> bool:
    return any(each.is_floating_point() for each in tensors_of(node.meta.get("val")))
