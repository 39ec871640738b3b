"""Recompute: B computes some values of the forward again instead of keeping them.

Forward nodes are duplicated under the label B, right before their first use in the backward. They
are in B even if only W reads them, so the bytes between B and W do not change. Random numbers are
never drawn again, and buffers that the step writes are never read again.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch.fx import Node

from zbcompile.passes.capture.checkpoint_hints import checkpoint_region
from zbcompile.passes.compile_options import Policy
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.cost.node_cost import node_flops, node_seconds
from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import is_part, is_random, is_view, operator_name, reached
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
    of_batch = step.batch_values()
    changing = {*step.updated_buffers, step.vocabulary_values.lookup}  # F alone receives it

    def may_recompute(node: Node, policy: Policy) -> bool:
        if not can_recompute(node) or changing.intersection(node.all_input_nodes):
            return False
        if (
            policy not in ("hints", "selective")
            or is_part(node)
            or checkpoint_region(node) is not None
        ):
            return True
        by_parameter = not of_batch.issuperset(node.all_input_nodes)  # transposed, cast, too
        return policy == "selective" and not (by_parameter and node_flops(node))

    for stage, policy in enumerate(policies):
        if policy == "off":
            continue
        inputs, readers = _forward_values(step, labels, stage)
        computed = [node for node in inputs if labels[node].stage == stage]
        if policy == "hints" and not any(checkpoint_region(node) is not None for node in computed):
            continue
        allowed = {node: None for node in computed if may_recompute(node, policy)}
        candidates = Candidates(
            backward_inputs=frozenset(readers),
            inputs=inputs,
            bytes={  # keeping a view keeps its base
                node: storage_bytes([node])
                for node in inputs
                if isinstance(node.meta.get("val"), torch.Tensor)
                and not (is_view(node) and node in allowed)
            },
            cost={node: int(1e12 * node_seconds(node, hardware)) for node in allowed},  # in ps
        )
        choice = _choose(candidates, policy, stage, saved.get(stage, 0))
        chosen: set[Node] = set()
        for node in computed:  # to keep a view of a value that is kept takes no bytes
            if not is_part(node) or chosen.intersection(node.all_input_nodes):
                chosen |= choice.recomputed & {node}
        _duplicate(step, labels, Label(stage, BACKWARD), chosen, readers)
    return saved


def _forward_values(
    step: StepGraph, labels: Labels, stage: int
) -> tuple[dict[Node, tuple[Node, ...]], dict[Node, list[Node]]]:
    """Returns the forward of a stage as its backward sees it: the values that the stage receives
    and then those that it computes, each with the values that computing it reads, and the nodes of
    B and W that read each."""
    received: dict[Node, tuple[Node, ...]] = {}
    computed: list[Node] = []
    readers: dict[Node, list[Node]] = {}
    for node in step.calls():
        label = labels.get(node)
        if label is None or label.kind != FORWARD or label.stage > stage:
            continue
        users = [user for user in node.users if user in labels and labels[user].stage == stage]
        backward = [user for user in users if labels[user].kind in (BACKWARD, WEIGHT)]
        if backward:
            readers[node] = backward
        if label.stage == stage:
            computed.append(node)
        elif backward or any(labels[user].kind == FORWARD for user in users):
            received[node] = ()
    values = {*received, *computed}
    inside = {n: tuple(s for s in n.all_input_nodes if s in values) for n in computed}
    return {**received, **inside}, readers


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


def _duplicate(
    step: StepGraph,
    labels: Labels,
    label: Label,
    chosen: Set[Node],
    backward_readers: Mapping[Node, Sequence[Node]],
) -> None:
    """Duplicates the chosen nodes that the backward reads, each before its first use."""
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
            labels[copy] = label
            copies[source] = copy
        return copies[node]

    readers = {
        reader: None
        for node, node_readers in backward_readers.items()
        if node in chosen
        for reader in node_readers
    }
    for reader in sorted(readers, key=position.__getitem__):
        for node in reader.all_input_nodes:
            if node in chosen:
                reader.replace_input_with(node, copy_before(reader, node))


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
