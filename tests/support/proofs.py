"""Proofs of small models along one dimension of a mesh of two ranks, in one process: the graphs of both are captured,
one after the other, in a group whose other ranks are not there."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.fx import Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.meshes import mesh_of
from tests.support.oracle import Batch, Loss
from zbcompile.batches.batch import whole_batch
from zbcompile.compiler.compile_model import LaidOut, compile_laid_out, labels_of, lay_out_step, make_manager
from zbcompile.distributed.mesh import BATCHES, PARTS
from zbcompile.model.distributed_tensors import Parts
from zbcompile.model.placements import placement_of
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.pass_list.passes_in_order import CUT
from zbcompile.passes.split.gradient_flow import GradientFlow
from zbcompile.passes.split.joint_graph import tangents_of, trace_joint
from zbcompile.passes.verification.placement_proof import Axis, PlacementProof
from zbcompile.passes.verification.value_kinds import texts_of
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram
from zbcompile.schedules import build

RANKS = 2
Made = tuple[nn.Module, Loss | None, Batch]


@dataclass(frozen=True)
class Case:
    """A model on a mesh that has one dimension beside the pipeline's: `make(mesh)` gives model, loss and a batch."""

    make: Callable[[Any], Made]
    dimension: str
    placements: Mapping[str, Mapping[str, str]]
    stages: int = 2
    vocab: bool = False  # whether the output layer is sharded over the stages


@dataclass(frozen=True)
class Captured:
    """One rank's graphs, with the constants of its model and the names of those of its parameters that are parts."""

    flows: list[GradientFlow]
    constants: Mapping[str, Tensor]
    groups: Mapping[str, str]
    sharded: frozenset[str]
    vocabulary: VocabularyProgram | None = None


@contextlib.contextmanager
def alone(rank: int) -> Iterator[None]:
    """Inside, this process is one of two, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        with loss_parallel():
            yield
    finally:
        dist.destroy_process_group()


def captured(case: Case) -> Captured:
    mesh = mesh_of(pp=1, **{case.dimension: RANKS})
    model, loss, batch = case.make(mesh)
    labels = {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names or ()}
    rules = Parts(model, labels).placements
    microbatch = whole_batch(batch.args, dict(batch.kwargs), batch.target).whole
    choices = Choices(vocab=1) if case.vocab else Choices()
    laid_out = lay_out_step(model, microbatch, loss, choices, dimensions=labels)
    groups = {label: name for name, label in labels_of(laid_out.canonical).items()}
    sharded = frozenset(name for name, along in rules.items() if along.get(case.dimension) == "shard")
    if not case.vocab:
        return Captured(_flows(laid_out, case.stages), laid_out.canonical.captured.constants, groups, sharded)
    order = build("1f1b", ranks=case.stages, microbatches=case.stages)
    program = compile_laid_out(model, microbatch, laid_out, order, choices)
    flows = [stage.flow for stage in program.stages if stage.flow is not None]
    return Captured(flows, program.model.constants, groups, sharded, program.vocabulary)


def _flows(laid_out: LaidOut, count: int) -> list[GradientFlow]:
    """The gradients of a step that is cut into that many stages."""
    canonical, nodes = laid_out.canonical, laid_out.line.nodes
    stages = make_manager().run(CUT, canonical, laid_out.line, _assigned(nodes, count), count, False)
    flows: list[GradientFlow] = []
    gradients = None
    for stage in reversed(stages):
        trainable = canonical.captured.trainable
        joint = trace_joint(stage, trainable, tangents_of(stage, gradients), False, labels_of(canonical))
        gradients = joint.gradient_of_input
        assert joint.flow is not None
        flows.insert(0, joint.flow)
    return flows


def _assigned(nodes: Any, stages: int) -> dict[Node, int]:
    """As many nodes to each stage; what is taken out of a tuple is where the tuple is."""
    found: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        earliest = max((found[each] for each in node.all_input_nodes if each in found), default=0)
        taken = "getitem" in str(node.target)
        found[node] = earliest if taken else max(earliest, place * stages // len(nodes))
    return found


def axis_of(case: Case, sharded: frozenset[str]) -> Axis:
    name, rules = case.dimension, case.placements

    def placement(of: str) -> str:
        return "shard" if of in sharded else placement_of(of, rules)[name]

    return Axis(name, name in BATCHES, name in PARTS, placement, means=name == "cp")


def proof_of(case: Case, change: Callable[[list[GradientFlow]], Any] | None = None) -> PlacementProof:
    """The proof that the first rank makes; `change` is done to the graphs of both."""
    return proofs_of(case, (case.dimension,), change)[case.dimension]


def proofs_of(
    case: Case, dimensions: Sequence[str], change: Callable[[list[GradientFlow]], Any] | None = None
) -> dict[str, PlacementProof]:
    """The proofs along several dimensions: of a model that exchanges nothing its graphs are the same along each."""

    def graphs() -> Captured:
        found = captured(case)
        if change is not None:
            change(found.flows)
        return found

    with alone(1):
        other = graphs()
    with alone(0):
        own = graphs()
        return {name: prove(replace(case, dimension=name), own, other) for name in dimensions}


def prove(case: Case, own: Captured, other: Captured) -> PlacementProof:
    apart = []
    for flow, theirs in zip(own.flows, other.flows, strict=True):
        mine = texts_of(flow, own.constants, case.dimension)
        common = set(texts_of(theirs, other.constants, case.dimension))
        apart.append({n for n, text in zip(flow.module.graph.nodes, mine, strict=False) if text not in common})
    return PlacementProof(axis_of(case, own.sharded), own.flows, apart, own.groups, own.vocabulary)


def kinds_counted(proof: PlacementProof) -> dict[str, int]:
    """How many values there are of each kind: of the forwards' operations, and of the gradients of their values."""
    found = {"equal": 0, "differing": 0, "partial": 0, "unknown": 0}
    names = {"zero": "equal", "whole": "equal", "alike": "equal", "own": "differing", "loose": "differing"}
    names |= {"part": "partial"}
    for index, values in enumerate(proof.values):
        forward = (kind for node, kind in values.of.items() if node.op == "call_function")
        for kind in chain(forward, proof.gradients[index].of.values()):
            found[names.get(kind, kind)] += 1
    return found
