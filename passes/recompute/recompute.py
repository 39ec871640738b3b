"""Recompute: B computes some values of the forward again instead of keeping them.

Forward nodes are duplicated under the label B, right before their first use in the backward. They
are in B even if only W reads them, so the bytes between B and W do not change. Random numbers are
never drawn again, and buffers that the step writes are never read again.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node

from zbcompile.passes.capture.checkpoint_hints import checkpoint_region
from zbcompile.passes.compile_options import Policy
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.cost.node_cost import node_flops, node_seconds
from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import is_random, is_view, operator_name, reached
from zbcompile.passes.graph.storage import storage_bytes, storages_behind
from zbcompile.passes.recompute.saved_values import (
    Candidates,
    SavedValues,
    fewest_bytes,
    least_cost_within,
)
from zbcompile.passes.step_graph import BACKWARD, FORWARD, WEIGHT, Label, Labels, StepGraph
from zbcompile.passes.torch_private import OpOverload, schema_of

RECOMPUTED = "recomputed"  # key in node.meta of the duplicates


def recompute(
    step: StepGraph, labels: Labels, policies: Sequence[Policy], hardware: Hardware
) -> dict[int, int]:
    """Duplicates forward nodes under the label B, in place. Returns the bytes that each stage would
    keep for its backward without.

    Args:
        policies: One per stage. "off": nothing. "hints": the operations of torch.utils.checkpoint
            regions. "selective": also everything but products with parameters (Korthikanti et al.
            2022, section 5). "full": whatever can be. An int: the cheapest choice that keeps at
            most this number of bytes per microbatch between F and B. A float: the same with that
            share of the bytes that are kept without recomputation, or the fewest possible.
        hardware: The machine on which recomputation takes time.

    Raises:
        CompileError: A stage cannot keep as few bytes as its int says.
    """
    saved = saved_bytes(step, labels)
    for stage, policy in enumerate(policies):
        if policy == "off":
            continue
        forward = StageForward(step, labels, stage, hardware)
        if policy == "hints" and not any(map(_is_hinted, forward.computed)):
            continue
        candidates = forward.candidates("full" if isinstance(policy, int | float) else policy)
        choice = _choose(candidates, policy, stage, saved.get(stage, 0))
        if choice.recomputed:
            _duplicate(step, labels, forward, choice)
    return saved


class StageForward:
    """The forward of one stage as its backward sees it.

    Attributes:
        computed: Nodes that F computes.
        received: Values of earlier stages that this stage reads.
        backward_readers: The nodes of B and W of this stage that read a value of either kind.
    """

    def __init__(self, step: StepGraph, labels: Labels, stage: int, hardware: Hardware) -> None:
        self.hardware, self.backward = hardware, Label(stage, BACKWARD)
        self.computed: list[Node] = []
        self.received: list[Node] = []
        self.backward_readers: dict[Node, list[Node]] = {}
        forward, weight = Label(stage, FORWARD), Label(stage, WEIGHT)
        for node in step.calls():
            label = labels.get(node)
            if label is None or label.kind != FORWARD or label.stage > stage:
                continue
            users = {user: labels[user] for user in node.users if user in labels}
            readers = [user for user, kind in users.items() if kind in (self.backward, weight)]
            if readers:
                self.backward_readers[node] = readers
            if label == forward:
                self.computed.append(node)
            elif readers or forward in users.values():
                self.received.append(node)
        self._changing = {
            step.buffers[name] for name in step.buffer_updates if name in step.buffers
        }
        if step.vocabulary_values.lookup is not None:
            self._changing.add(step.vocabulary_values.lookup)  # F alone receives it
        self._trained = _values_of_parameters(step)

    def candidates(self, policy: str) -> Candidates:
        """Returns the values of the forward with what it costs to keep and to recompute each."""
        values = (*self.received, *self.computed)
        allowed = {n: None for n in self.computed if self._may_recompute(n, policy)}
        inputs: dict[Node, tuple[Node, ...]] = dict.fromkeys(self.received, ())
        for node in self.computed:
            inputs[node] = tuple(s for s in node.all_input_nodes if s in inputs)
        return Candidates(
            backward_inputs=frozenset(self.backward_readers),
            inputs=inputs,
            bytes={
                node: storage_bytes([node]) for node in values if _can_keep(node, node in allowed)
            },
            cost={node: int(1e12 * node_seconds(node, self.hardware)) for node in allowed},  # in ps
        )

    def _may_recompute(self, node: Node, policy: str) -> bool:
        if not can_recompute(node) or self._changing.intersection(node.all_input_nodes):
            return False
        free = is_view(node) or operator_name(node) == "getitem"
        if policy == "full" or free or _is_hinted(node):
            return True
        product_with_parameter = node_flops(node) and self._trained & set(node.all_input_nodes)
        return policy == "selective" and not product_with_parameter


def _is_hinted(node: Node) -> bool:
    return checkpoint_region(node) is not None


_UNINITIALIZED = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "empty_permuted"),
        *("new_empty", "new_empty_strided"),
    }
)


def can_recompute(node: Node) -> bool:
    """Returns True if an operation computes the same bits from the same inputs once more."""
    if operator_name(node) == "getitem":
        return can_recompute(node.all_input_nodes[0])
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False  # nothing is known of other libraries' operators
    return not (
        schema_of(target).is_mutable
        or is_random(node)
        or torch.Tag.nondeterministic_bitwise in target.tags
        or operator_name(node) in _UNINITIALIZED
    )


def _choose(candidates: Candidates, policy: Policy, stage: int, without: int) -> SavedValues:
    """Returns what a stage keeps that would keep `without` bytes if it recomputed nothing."""
    smallest = fewest_bytes(candidates)
    if isinstance(policy, float):
        return least_cost_within(candidates, int(policy * without)) or smallest
    if isinstance(policy, int):
        saved = least_cost_within(candidates, policy)
        if saved is None:
            raise CompileError(
                f"recompute={policy:,} bytes: stage {stage} keeps at least {smallest.bytes:,} "
                "bytes per microbatch between F and B, its inputs and what cannot be recomputed. "
                "Allow more bytes, use more stages, or make the microbatches smaller."
            )
        return saved
    return smallest


def _duplicate(step: StepGraph, labels: Labels, forward: StageForward, saved: SavedValues) -> None:
    """Duplicates the recomputed nodes that the backward reads, each before its first use.

    Views of kept values are not duplicated: to keep them takes no bytes.
    """
    chosen: set[Node] = set()
    for node in forward.computed:
        is_part = is_view(node) or operator_name(node) == "getitem"
        if node in saved.recomputed and (not is_part or chosen.intersection(node.all_input_nodes)):
            chosen.add(node)
    position = {node: index for index, node in enumerate(step.graph.nodes)}
    copies: dict[Node, Node] = {}

    def missing_of(nodes: Iterable[Node]) -> list[Node]:
        return [node for node in nodes if node in chosen and node not in copies]

    def copy_before(place: Node, node: Node) -> Node:
        missing = reached(missing_of([node]), lambda source: missing_of(source.all_input_nodes))
        for source in sorted(missing, key=position.__getitem__):
            with step.graph.inserting_before(place):
                copy = step.graph.node_copy(source, lambda value: copies.get(value, value))
            copy.meta = {**source.meta, RECOMPUTED: True, "pass": "recompute"}
            labels[copy] = forward.backward
            copies[source] = copy
        return copies[node]

    readers = {
        reader: None
        for node, node_readers in forward.backward_readers.items()
        if node in chosen
        for reader in node_readers
    }
    for reader in sorted(readers, key=position.__getitem__):
        for node in reader.all_input_nodes:
            if node in chosen:
                reader.replace_input_with(node, copy_before(reader, node))


def _can_keep(node: Node, may_recompute: bool) -> bool:
    """Returns True for a tensor that is no view of another: keeping a view keeps its base."""
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return is_tensor and not (is_view(node) and may_recompute)


def _values_of_parameters(step: StepGraph) -> set[Node]:
    """Returns parameters and values of parameters alone: transposed and cast weights."""
    constant = {*step.buffers.values(), *step.constants.values()}
    constant_values = set(step.parameters.values())
    for node in step.calls():
        inputs = set(node.all_input_nodes)
        if inputs & constant_values and inputs - constant_values <= constant:
            constant_values.add(node)
    return constant_values


def saved_bytes(step: StepGraph, labels: Labels) -> dict[int, int]:
    """Returns the bytes that each stage keeps for its backward, by storage, views once."""
    tables = (step.parameters, step.buffers, step.constants, step.batch_inputs)
    resident = storages_behind(node for table in tables for node in table.values())
    saved: dict[int, list[Node]] = {}
    for node, (stage, kind) in labels.items():
        for source in node.all_input_nodes if kind in (BACKWARD, WEIGHT) else ():
            maker = labels.get(source)
            if maker is not None and maker.kind == FORWARD and maker.stage <= stage:
                saved.setdefault(stage, []).append(source)
    return {stage: storage_bytes(sources, resident) for stage, sources in saved.items()}


def policies_of(recompute: Policy | Sequence[Policy], stages: int) -> list[Policy]:
    """Returns one policy per stage for the option `recompute=`.

    >>> policies_of(["off", "full"], 2)
    ['off', 'full']
    """
    if isinstance(recompute, str | int | float):
        return [recompute] * stages
    if len(recompute) != stages:
        raise CompileError(
            f"recompute={list(recompute)} has {len(recompute)} entries, but the schedule has "
            f"{stages} stages. Give one entry for all stages, or one for each in the order of the "
            "model."
        )
    return list(recompute)
