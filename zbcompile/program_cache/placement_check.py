"""What the graphs of all ranks prove of a step: its gradients, its loss and its buffers are right along every dimension
of the mesh (`zbcompile.passes.verification.placement_proof`), or it is refused before it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from zbcompile.distributed.agreement import gathered, together
from zbcompile.distributed.mesh import BATCHES, PARTS
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PlacementError
from zbcompile.model.placements import CHOSEN, placement_of
from zbcompile.passes.graph.process_groups import groups_in
from zbcompile.passes.graph.source_location import source_line
from zbcompile.passes.split.gradient_flow import GradientFlow
from zbcompile.passes.verification.placement_proof import Axis, FaultText, PlacementProof
from zbcompile.passes.verification.value_kinds import RULES, texts_of
from zbcompile.program.program import Program

Texts = Mapping[str, Sequence[set[str]]]  # by dimension, for each stage


def with_proof(ranks: Ranks, program: Program) -> Program:
    """`program` with what was left to compare in its first step. All ranks call it. Raises
    PlacementError, on every rank, for what cannot be right.
    """
    flows = [stage.flow for stage in program.stages if stage.flow is not None]
    used = {group for flow in flows for group in groups_in(flow.module.graph)}
    # The gradients of replicas that exchange nothing are of their own batches, and the step sums them.
    dimensions = [name for name in ranks.mesh.beside("pp") if name in CHOSEN or name in used]
    if not dimensions or len(flows) < len(program.stages):
        return program
    constants = program.model.constants
    own = {name: [texts_of(flow, constants, name) for flow in flows] for name in dimensions}
    reports = gathered(ranks, {name: [set(texts) for texts in stages] for name, stages in own.items()})
    proofs: list[PlacementProof] = []

    def prove() -> None:
        for name in dimensions:
            others = [report[name] for report in _beside(ranks, name, reports)]
            apart = [_apart(flow, own[name][i], [each[i] for each in others]) for i, flow in enumerate(flows)]
            axis = axis_of(program, name)
            proofs.append(PlacementProof(axis, flows, apart, program.groups, program.vocabulary))
            if proofs[-1].wrong:
                raise refusal(name, proofs[-1].wrong)

    together(ranks, "the proof of placements", prove)
    unproven = {proof.axis.dimension: frozenset(proof.unknown) for proof in proofs}
    stages = tuple(replace(stage, flow=None) for stage in program.stages)
    return replace(program, stages=stages, unproven=unproven, rules=RULES)


def axis_of(program: Program, dimension: str) -> Axis:
    """What the ranks along a dimension have in common."""
    means = dimension == "cp" and program.step.loss_reduction == "mean"
    batches, averaged = dimension in BATCHES, dimension in PARTS
    rules = program.step.placements or {}  # what is left to sum at the end of a step the graphs still sum themselves
    return Axis(dimension, batches, averaged, lambda name: placement_of(name, rules)[dimension], means)


def _beside(ranks: Ranks, dimension: str, reports: Sequence[Texts]) -> list[Texts]:
    """The reports of the ranks that differ from this one along one dimension at most."""
    rest = ranks.mesh.beside(dimension)
    here = [ranks.mesh.index(name) for name in rest]
    places = [ranks.mesh.place_of(rank) for rank in ranks.members]
    return [each for each, at in zip(reports, places, strict=True) if [at[name] for name in rest] == here]


def _apart(flow: GradientFlow, texts: Sequence[str], others: Sequence[set[str]]) -> set[Node]:
    """The operations of a stage that another rank does not do."""
    common = set.intersection(*map(set, others))
    return {node for node, text in zip(flow.module.graph.nodes, texts, strict=False) if text not in common}


def refusal(dimension: str, wrong: Sequence[FaultText]) -> PlacementError:
    """The error for what is wrong along a dimension."""
    first = wrong[0]
    line = source_line(first.node) if first.node is not None else "the model"
    more = f" ({len(wrong) - 1} more such places.)" if wrong[1:] else ""
    remedy = first.remedy.format(name=first.name, dimension=dimension)
    text = f'along "{dimension}", {first.what.format(name=first.name, line=line)}.{more} {remedy}'
    return PlacementError(text, first.name, dimension, line)
