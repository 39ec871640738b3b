"""Proofs of small models along one dimension of a mesh of two ranks, in one process: the graphs of both are captured,
one after the other, in a group whose other ranks are not there."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.fx import Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.meshes import mesh_of
from zbcompile.batches.batch import whole_batch
from zbcompile.compiler.compile_model import labels_of, lay_out_step, make_manager
from zbcompile.distributed.mesh import BATCHES, PARTS
from zbcompile.model.distributed_tensors import Parts
from zbcompile.model.placements import placement_of
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.pass_list.passes_in_order import CUT
from zbcompile.passes.split.gradient_flow import GradientFlow
from zbcompile.passes.split.joint_graph import tangents_of, trace_joint
from zbcompile.passes.verification.placement_proof import Axis, PlacementProof
from zbcompile.passes.verification.value_kinds import texts_of

RANKS = 2


@dataclass(frozen=True)
class Case:
    """A model on a mesh that has one dimension beside the pipeline's: `make(mesh)` gives model, loss, input, target."""

    make: Callable[[Any], tuple[nn.Module, Any, Tensor, Tensor]]
    dimension: str
    placements: Mapping[str, Mapping[str, str]]
    stages: int = 2


@dataclass(frozen=True)
class Captured:
    """One rank's graphs, with the constants of its model and the placements that its DTensors have."""

    flows: list[GradientFlow]
    constants: Mapping[str, Tensor]
    groups: Mapping[str, str]
    sharded: frozenset[str]


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
    model, loss, x, y = case.make(mesh)
    labels = {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names or ()}
    rules = Parts(model, labels).placements
    laid_out = lay_out_step(model, whole_batch((x,), {}, y).whole, loss, Choices(), dimensions=labels)
    canonical, nodes = laid_out.canonical, laid_out.line.nodes
    stages = make_manager().run(CUT, canonical, laid_out.line, _assigned(nodes, case.stages), case.stages, False)
    flows: list[GradientFlow] = []
    gradients = None
    for stage in reversed(stages):
        trainable = canonical.captured.trainable
        joint = trace_joint(stage, trainable, tangents_of(stage, gradients), False, labels_of(canonical))
        gradients = joint.gradient_of_input
        assert joint.flow is not None
        flows.insert(0, joint.flow)
    groups = {label: name for name, label in labels_of(canonical).items()}
    sharded = frozenset(name for name, along in rules.items() if along.get(case.dimension) == "shard")
    return Captured(flows, canonical.captured.constants, groups, sharded)


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
    with alone(1):
        other = captured(case)
        if change is not None:
            change(other.flows)
        texts = [set(texts_of(flow, other.constants, case.dimension)) for flow in other.flows]
    with alone(0):
        own = captured(case)
        if change is not None:
            change(own.flows)
        return prove(case, own, texts)


def prove(case: Case, own: Captured, texts: list[set[str]]) -> PlacementProof:
    apart = []
    for flow, others in zip(own.flows, texts, strict=True):
        mine = texts_of(flow, own.constants, case.dimension)
        apart.append({n for n, text in zip(flow.module.graph.nodes, mine, strict=False) if text not in others})
    return PlacementProof(axis_of(case, own.sharded), own.flows, apart, own.groups)
