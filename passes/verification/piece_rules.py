"""What holds of F, B, W and BW: who computes what, what waits between them, where gradients go; and of the graphs of
shards and pairs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.graph.fx import is_random, operations_behind
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.graph.storage import bytes_behind, is_view, storages_behind, tensors_of
from zbcompile.passes.split.saved_bytes import LOSS, Crossing, is_resident
from zbcompile.passes.split.split import Split
from zbcompile.passes.split.subgraphs import LATER
from zbcompile.passes.split.weight_cut import is_cheap
from zbcompile.passes.stage.overlap import MergedPieces, ask, hand_over, pick
from zbcompile.passes.stage.stage_program import StageProgram, tensor_spec
from zbcompile.passes.torch_private import is_in_place, storage_key
from zbcompile.passes.verification.graph_rules import form_of
from zbcompile.passes.verification.graph_views import GraphView, graphs_of, pieces_of
from zbcompile.passes.verification.rule import Break, graph_rule, rule
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram

aten = torch.ops.aten
Pieces = Split | StageProgram


def _by_name(view: GraphView) -> dict[str, Node]:
    """The operations by name: those of a joint graph keep their names in its pieces."""
    return {node.name: node for node in view.calls}


@rule("every operation that a result needs is in F, B or W, and one in two of them is marked as repeated in W")
def each_operation_once(made: Split, before: Any) -> Iterator[Break]:
    pieces = pieces_of(made)
    forward, backward, weight = (_by_name(pieces[name]) for name in "FBW")
    results = (node for slot, node in made.joint.outputs if slot.kind != "virtual_gradient")
    for node in operations_behind(results):
        if node.name not in forward and node.name not in backward and node.name not in weight:
            yield Break("is in none of F, B and W", node, f"stage {made.joint.stage.index}")
    for name in forward.keys() & backward.keys():
        yield Break("is also in F", backward[name], pieces["B"].title)
    for name in weight.keys() & (forward.keys() | backward.keys()):
        if "repeated" not in weight[name].meta:
            yield Break(f"is also in {'F' if name in forward else 'B'}, unmarked", weight[name], pieces["W"].title)


@rule("W repeats only views and memory-bound operations")
def repeats_cheap(made: Split, before: Any) -> Iterator[Break]:
    weight = pieces_of(made)["W"]
    for node in weight.calls:
        if "repeated" in node.meta and not (is_view(node) or is_cheap(node)):
            yield Break(f"repeats {node.target}", node, weight.title)


@rule("BW computes what B and W compute, the two calls of a cut convolution backward in one")
def fused_is_both(made: Split, before: Any) -> Iterator[Break]:
    pieces = pieces_of(made)
    both, fused = _by_name(pieces["B"]) | _by_name(pieces["W"]), _by_name(pieces["BW"])
    for name in fused.keys() - both.keys():
        yield Break("is in neither B nor W", fused[name], pieces["BW"].title)
    merged = {node.args[:2] for node in fused.values() if node.target is aten.convolution_backward.default}
    for name in both.keys() - fused.keys():
        if not (both[name].target is aten.convolution_backward.default and merged):
            yield Break("is not in BW", both[name], f"B or W of stage {made.joint.stage.index}")


@rule("only F draws random numbers")
def draws_in_forward(made: Pieces, before: Any) -> Iterator[Break]:
    for name, view in pieces_of(made).items():
        yield from (Break("draws", node, view.title) for node in view.calls if name != "F" and is_random(node))


@rule("F draws every random number of its stage once, in order")
def draws_all(made: Split, before: Any) -> Iterator[Break]:
    view = pieces_of(made)["F"]
    wanted = [node.name for node in made.joint.module.graph.nodes if is_random(node)]
    drawn = [node.name for node in view.calls if is_random(node)]
    if drawn != wanted:
        yield Break(f"draws {drawn or 'nothing'}, but its stage {wanted or 'nothing'}", None, view.title)


@rule("an earlier pass returns, in that form, each saved value that a pass reads, and every saved value is read")
def saved_arrives(made: Pieces, before: Any) -> Iterator[Break]:
    pieces = pieces_of(made)
    saved = {name: _of_kind(pieces[name].leaving, "saved") for name in "FB"}
    read = {name: _of_kind(pieces[name].arriving, "saved") for name in ("B", "W", "BW")}
    for name, sources in (("B", ("F",)), ("W", ("F", "B")), ("BW", ("F",))):
        for slot, node in read[name].items():
            maker = next((saved[source][slot] for source in sources if slot in saved[source]), None)
            if maker is None:
                yield Break(f"is {slot}, which {' and '.join(sources)} did not return", node, pieces[name].title)
            elif form_of(maker.meta["val"]) != form_of(node.meta["val"]):
                was, now = form_of(maker.meta["val"]), form_of(node.meta["val"])
                yield Break(f"is read as {now} and was saved as {was}", node, pieces[name].title)
    for name in "FB":
        for slot in saved[name].keys() - set().union(*(read[later] for later in LATER[name])):
            yield Break("is saved, but no later pass reads it", saved[name][slot], pieces[name].title)


def _of_kind(pairs: Iterable[tuple[Slot, Node]], kind: str) -> dict[Slot, Node]:
    return {slot: node for slot, node in pairs if slot.kind == kind}


@rule("the reported bytes between passes are those of the storages kept")
def crossing_counted(made: Pieces, before: Any) -> Iterator[Break]:
    counted = _count(pieces_of(made))
    for name, size in vars(counted).items():
        reported = getattr(made.crossing, name)
        if reported != size:
            index = made.stage if isinstance(made, StageProgram) else made.joint.stage.index
            yield Break(f"{name} is reported as {reported:,} bytes but has {size:,}", None, f"stage {index}")


def _count(pieces: Mapping[str, GraphView]) -> Crossing:
    """The same bytes from the inputs of B and W alone."""
    changed = {slot.name for slot in pieces["F"].outputs if slot.kind == "mutation"}
    arriving = (pair for view in pieces.values() for pair in view.arriving)
    free = storages_behind(node for slot, node in arriving if is_resident(slot, changed))
    from_backward = {slot for slot in pieces["B"].outputs if slot.kind == "saved"}
    for_backward = [node for slot, node in pieces["B"].arriving if slot.kind != "tangent"]
    for_weight = [(slot, node) for slot, node in pieces["W"].arriving if slot.kind != "accumulator"]
    late = [node for slot, node in for_weight if slot.kind == "tangent" or slot in from_backward]
    early = [node for slot, node in for_weight if slot.kind != "tangent" and slot not in from_backward]
    kinds = (for_backward, early, late, for_backward + early, late + early)
    return Crossing(*(bytes_behind(nodes, free) for nodes in kinds))


@rule("W and BW return, or add to its buffer, the gradient of every trained parameter, and of no other")
def gradients_complete(made: StageProgram, before: Any) -> Iterator[Break]:
    for name in ("W", "BW"):
        view = pieces_of(made)[name]
        slots = [*view.inputs, *view.outputs]
        found = {slot.name for slot in slots if slot.kind in ("gradient", "accumulator")}
        for parameter in set(made.trained) - found:
            yield Break(f"{parameter} gets no gradient", None, view.title)
        for parameter in found - set(made.trained):
            yield Break(f"{parameter} is not trained but gets a gradient", None, view.title)


@graph_rule("only gradient buffers are written in place")
def only_buffers_written(view: GraphView) -> Iterator[Break]:
    buffers = {node for slot, node in view.arriving if slot.kind == "accumulator"}
    written = set()
    for node in view.calls:
        if is_in_place(node.target):
            into = _behind_views(node.args[0])
            written.add(into)
            if into not in buffers:
                yield Break(f"writes into {into.name}, which is not a gradient buffer", node)
    yield from (Break("is never added to", node) for node in buffers - written)


def _behind_views(value: Any) -> Node:
    """The placeholder or operation behind the views that a write goes through."""
    node: Node = value
    while node.op == "call_function" and node.meta.get("pass") == "accumulate" and not is_in_place(node.target):
        node = node.args[0]  # type: ignore[assignment]
    return node


@rule("no returned gradient aliases another tensor, so that it may become .grad")
def gradients_own(made: StageProgram, before: Any) -> Iterator[Break]:
    for view in graphs_of(made):
        first = {storage_key(t): slot for slot, node in view.arriving for t in tensors_of(node.meta.get("val"))}
        for slot, node in view.leaving:
            keys = {storage_key(t): slot for t in tensors_of(node.meta.get("val"))}
            if slot.kind == "gradient" and keys.keys() & first.keys():
                yield Break(f"shares its memory with {first[min(keys.keys() & first.keys())]}", node, view.title)
            first |= keys


@rule("a stage's description matches what its graphs receive and send")
def messages_described(made: StageProgram, before: Any) -> Iterator[Break]:
    pieces = pieces_of(made)
    told = (
        (made.receives, pieces["F"], pieces["F"].arriving, "activation"),
        (made.sends, pieces["F"], pieces["F"].leaving, "activation"),
        (made.gradients_in, pieces["BW"], pieces["BW"].arriving, "tangent"),
        (made.gradients_out, pieces["BW"], pieces["BW"].leaving, "input_gradient"),
    )
    for specs, view, pairs, kind in told:
        nodes = {slot.name: node for slot, node in pairs if slot.kind == kind and slot != LOSS}
        # an activation that nothing reads, and its gradient, need not arrive
        missing = () if kind == "tangent" else specs.keys() - nodes.keys()
        yield from (Break(f"returns no {kind} {name}", None, view.title) for name in missing)
        for name, node in nodes.items():
            if name not in specs:
                yield Break(f"is the {kind} {name}, which the stage's description does not list", node, view.title)
            elif (spec := tensor_spec(node.meta["val"]))[:1] + spec[2:4] != specs[name][:1] + specs[name][2:4]:
                yield Break(f"is {spec.dtype}{list(spec.shape)} but described as {specs[name]}", node, view.title)


@rule("the shards cover all words, each once, in the order of the ranks")
def words_covered(made: VocabularyProgram, before: Any) -> Iterator[Break]:
    for (_, high), (low, _) in pairwise(made.bounds):
        if high != low:
            yield Break(f"one shard ends before word {high}, and the next begins with word {low}")
    if len(made.pieces) != len(made.bounds):
        yield Break(f"{len(made.bounds)} shards have the graphs of {len(made.pieces)}")


@rule("a pair does what its forward and its backward do, each operation once, and nothing else")
def halves_complete(made: MergedPieces, before: Any) -> Iterator[Break]:
    (view,) = graphs_of(made)
    halves = (made.first.module.graph, made.second.module.graph)
    wanted = Counter(n.target for graph in halves for n in graph.nodes if n.op == "call_function")
    found = Counter(node.target for node in view.calls if node.target not in (hand_over, ask, pick))
    for target in wanted.keys() | found.keys():
        if wanted[target] != found[target]:
            node = next((node for node in reversed(view.calls) if node.target == target), None)
            yield Break(f"{target}: {wanted[target]} in the halves, {found[target]} in the pair", node, view.title)
