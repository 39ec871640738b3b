"""Along one dimension of the mesh, what every gradient of a stage is: the whole one, a part of a sum, a rank's own.

A value that is equal on all ranks is one value, and its gradient the sum of what all ranks make of it. So a rank's
gradient of it is either the *whole*, the same on all ranks, or a *part* that must be summed. A value that differs has a
gradient of its *own* on every rank. An operation on an equal value that makes a differing one begins parts, a sum over
the ranks ends them; what the forward exchanges, the backward must exchange back. This is how JAX types the cotangents
of values that vary over a mesh, here read out of a backward that somebody else has written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from torch.fx import Node

from zbcompile.passes.graph.fx import is_getitem
from zbcompile.passes.graph.process_groups import group_of, is_numbered, is_wait
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import is_view, tensors_of
from zbcompile.passes.split.gradient_flow import BackwardStep
from zbcompile.passes.verification.value_kinds import Kind, PlacementFault, ValueKinds, aten, operands_of

# alike: a rank's own, and the same number on all ranks; loose: a part if the value is equal on all ranks, else a rank's
# own; mixed: a whole and a part, added up
MANY = 16  # exchanges inside of one step: more are not counted
Share = Literal["whole", "part", "own", "alike", "loose", "mixed", "unknown"]


class IncomingGradient(NamedTuple):
    """A gradient inside of a step: `crossed` is the number of the last exchange that it comes from."""

    share: Share
    crossed: Node | None = None
    times: int = 0


class ForwardPath(NamedTuple):
    """A way through the forward: through how many exchanges, and whether one of them sums."""

    times: int
    summed: bool


@dataclass
class GradientKinds:
    """The gradients of a stage: `forward` has the kinds of its values, `behind` the shares that arrive for its outputs,
    by name. `of` is what each value gets, by number; a value whose operation is hidden inside another is `loose`."""

    forward: ValueKinds
    behind: Mapping[str, Share]
    of: dict[int, Share] = field(default_factory=dict)
    faults: list[PlacementFault] = field(default_factory=list)
    added: dict[int, list[tuple[Share, Node]]] = field(default_factory=dict)
    hidden: dict[int, tuple[frozenset[int], Node | None, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        flow = self.forward.flow
        tangents = {slot.name: node for slot, node in flow.inputs if slot.kind == "tangent"}
        for number, slot in flow.roots:
            self.added.setdefault(number, []).append((self.behind[slot.name], tangents[slot.name]))
        for step in flow.steps:
            self._run(step)
        for number, _ in flow.leaves:
            self._settle(number)

    def kind(self, number: int) -> Kind | Literal["hidden"]:
        """What a value is on the ranks. A zero only passes a gradient on, as what is hidden does."""
        made = self.forward.flow.made.get(number)
        found = "zero" if made is None else self.forward.of.get(made, "unknown")
        return "hidden" if found == "zero" else found

    def _settle(self, number: int) -> Share:
        """The share of a value, of which all gradients have arrived."""
        if number in self.of:
            return self.of[number]
        found = self.added.get(number, [])
        shares: set[Share] = {share for share, _ in found}
        kind = self.kind(number)
        if "unknown" in shares or kind == "unknown":
            self.of[number] = "unknown"
        elif kind == "equal" and (shares >= {"whole", "part"} or "mixed" in shares):
            bad = next(node for share, node in found if share in ("part", "mixed"))
            self.faults.append(
                PlacementFault(
                    "makes a part of a gradient, of which the rest is whole: the parts are not summed", bad, number
                )
            )
            self.of[number] = "unknown"
        elif kind == "differing":
            self.of[number] = "alike" if shares == {"alike"} else "own"
        else:
            self.of[number] = next(iter(shares)) if len(shares) == 1 else "loose"
        return self.of[number]

    def _run(self, step: BackwardStep) -> None:
        gets: dict[Node, IncomingGradient] = {}
        origins = frozenset[int]()
        for number, node in step.results:
            behind, crossed, times = self.hidden.get(number, (frozenset({number}), None, 0))
            gets[node] = IncomingGradient(self._settle(number), crossed, times)
            origins |= behind
        for number, node, replicated in step.arguments:
            before = len(self.faults)
            found = self._through(node, gets, {})
            self.faults[before:] = [replace(each, value=number) for each in self.faults[before:]]
            share = self._arrive(number, node, found, origins)
            if share == "part" and found.share == "alike" and self.forward.dimension in replicated:
                share = "whole"  # DTensor lets one rank alone add what is replicated to a part
            self.added.setdefault(number, []).append((share, node))

    def _through(
        self, node: Node, gets: Mapping[Node, IncomingGradient], known: dict[Node, IncomingGradient | None]
    ) -> IncomingGradient:
        """What a step makes of the gradients that it `gets`."""
        pending = [node]
        while pending:
            top = pending[-1]
            if top in gets or top in self.forward.of:
                known[top] = gets.get(top)
            elif (
                top not in known and (twin := next((each for each in gets if _same_view(each, top)), None)) is not None
            ):
                known[top] = gets[twin]
            missing = [each for each in top.all_input_nodes if each not in known] if top not in known else []
            if missing:
                pending += missing
            else:
                pending.pop()
                if top not in known:
                    known[top] = self._made_by(top, known)
        return known[node] or IncomingGradient("unknown")

    def _made_by(self, node: Node, known: Mapping[Node, IncomingGradient | None]) -> IncomingGradient | None:
        copies = getattr(node.target, "overloadpacket", None) is aten.copy
        read = operands_of(node) if copies else node.all_input_nodes
        found = [(each, known[each]) for each in read]
        given = [arriving for _, arriving in found if arriving is not None]
        kinds = self.forward.of
        others = [kinds[each] for each, arriving in found if arriving is None and each in kinds]
        if not given:
            return None
        crossed = max(given, key=lambda each: each.times)
        shares: set[Share] = {each.share for each in given}
        share = shares.pop() if len(shares) == 1 else _of_several(shares)
        group = group_of(node)
        if group == self.forward.dimension:
            local = (exchange := self.forward.exchange(node)) is not None and exchange.what == "none"
            return crossed if local else IncomingGradient(self._exchanged(node, share), node, crossed.times + 1)
        if share == "unknown" or (group is not None and is_numbered(group)) or "unknown" in others:
            return crossed._replace(share="unknown")
        if share in ("whole", "alike") and not is_wait(node):
            share = "own" if self.forward.is_apart(node) else "loose" if "differing" in others else share
        elif share == "own" and not _is_laid_out_anew(node, len(given) == len(found)):
            share = "loose"
        return crossed._replace(share=share)

    def _exchanged(self, node: Node, share: Share) -> Share:
        """The rule of a collective."""
        exchange = self.forward.exchange(node)
        if share == "unknown" or exchange is None:
            return "unknown"
        if exchange.summed and share in ("whole", "alike"):
            self.faults.append(
                PlacementFault("sums a gradient that is whole on every rank, which counts it once for each", node)
            )
            return "unknown"
        if exchange.summed and share == "own":
            self.faults.append(PlacementFault("sums the gradients of a value that differs between the ranks", node))
            return "unknown"
        made: dict[str, Share] = {"sum": "whole", "scatter": "own" if exchange.summed else "unknown"}
        if exchange.what in made:
            return made[exchange.what]
        if share == "part":  # of which parts are sent round, and none are summed
            return "part"
        moved: dict[str, Share] = {"gather": "unknown" if share == "whole" else "whole", "permute": "own"}
        return moved.get(exchange.what, "whole" if share == "whole" else "unknown")

    def _arrive(self, number: int, node: Node, found: IncomingGradient, origins: frozenset[int]) -> Share:
        kind = self.kind(number)
        if kind == "hidden":
            self.hidden[number] = (
                self.hidden.get(number, (frozenset(), None, 0))[0] | origins,
                *found[1:],
            )
            return found.share
        if "unknown" in (kind, found.share):
            return "unknown"
        ways = {way for origin in origins for way in self._ways(number, origin)}
        if kind == "equal":
            summed = bool(ways) and all(way.summed for way in ways) and found.crossed is None
            return found.share if found.share in ("whole", "part", "mixed") and not summed else "part"
        what = self._unlike(found, ways, origins)
        if what:
            self.faults.append(PlacementFault(what, found.crossed or node, number))
        return "alike" if found.share in ("whole", "alike") else "own"

    def _unlike(self, found: IncomingGradient, ways: set[ForwardPath], origins: frozenset[int]) -> str:
        """What is wrong with the gradient of a value that differs; "" if nothing is."""
        if found.share == "part":
            return "makes a part of a gradient, which nothing sums before it reaches a value that differs between ranks"
        counts = {way.times for way in ways}
        if counts == {0} and found.times:
            return "exchanges the gradient of a value that the forward does not exchange"
        if (
            len(counts) == 1
            and not all(self.kind(origin) == "equal" for origin in origins)
            and found.times not in counts
        ):
            return "takes the gradient of what the forward exchanges, and does not exchange it back as often"
        return ""

    def _ways(self, number: int, result: int) -> set[ForwardPath]:
        """How the forward goes from a value to another."""
        made, dimension = self.forward.flow.made, self.forward.dimension
        if number not in made or result not in made:
            return set()
        start, end, order = made[number], made[result], self.order
        seen, queue = set[tuple[Node, ForwardPath]](), [(end, ForwardPath(0, False))]
        while queue:
            node, way = queue.pop()
            if (node, way) in seen or order[node] < order[start] or way.times > MANY:
                continue
            seen.add((node, way))
            if node is not start:
                exchange = self.forward.exchange(node) if group_of(node) == dimension else None
                if exchange is not None and exchange.what != "none":
                    way = ForwardPath(way.times + 1, way.summed or exchange.summed)
                queue += [(each, way) for each in node.all_input_nodes if each in order]
        return {way for node, way in seen if node is start}

    @property
    def order(self) -> dict[Node, int]:
        if not hasattr(self, "_order"):
            self._order = {node: place for place, node in enumerate(self.forward.of)}
        return self._order

    def of_leaf(self, slot: Slot) -> set[Share]:
        """The shares of the uses of an input of the stage."""
        return {self.of[number] for number, each in self.forward.flow.leaves if each == slot and self.added.get(number)}


def _is_laid_out_anew(node: Node, whole: bool) -> bool:
    """Whether an operation only lays out gradients in another way; `whole`: it reads nothing else."""
    packet = getattr(node.target, "overloadpacket", None)
    if is_wait(node) or is_getitem(node) or packet in (aten.clone, aten.copy, aten.split):
        return True
    if packet is aten.cat:
        return whole
    sizes = {sum(t.numel() for t in tensors_of(each.meta["val"])) for each in (node, *node.all_input_nodes)}
    return is_view(node) and len(sizes) == 1


def _same_view(one: object, other: object) -> bool:
    """Whether two views are the same one, taken twice, as making a graph functional does."""
    if not (isinstance(one, Node) and isinstance(other, Node)) or one is other:
        return one == other
    same = one.target == other.target and is_view(one) and len(one.args) == len(other.args)
    return same and all(map(_same_view, one.args, other.args))


def _of_several(shares: set[Share]) -> Share:
    if "unknown" in shares:
        return "unknown"
    return "mixed" if shares & {"whole", "mixed"} else "part" if "part" in shares else "loose"
