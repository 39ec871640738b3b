"""What is decided by comparing the graphs of all ranks, once for each program.

* The proof of placements (`zbcompile.passes.verification.placement_proof`): a step's gradients, loss and buffers are
  right along every dimension of the mesh, or it is refused before it runs.
* Random numbers (`zbcompile.passes.stage.draws`): ranks that compute the same values draw the same random numbers;
  ranks that compute different parts draw different ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from zbcompile.distributed.agreement import gathered, together
from zbcompile.distributed.mesh import BATCHES, PARTS
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError, PlacementError
from zbcompile.model.placements import CHOSEN, SHARD, placement_of
from zbcompile.passes.graph.process_groups import groups_in
from zbcompile.passes.graph.source_location import source_line
from zbcompile.passes.split.gradient_flow import GradientFlow
from zbcompile.passes.stage.draws import Shares, drawing, with_draws_apart
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.verification.placement_proof import Axis, FaultText, PlacementProof
from zbcompile.passes.verification.value_kinds import RULES, texts_of
from zbcompile.program.program import Program

SHARING = ("tp", "cp")  # ranks along these share microbatches
Texts = Mapping[str, Sequence[set[str]]]  # by dimension, for each stage


def with_proof(ranks: Ranks, program: Program) -> Program:
    """`program` with what its first step has still to compare. All ranks call it.

    Raises PlacementError, on every rank, for what cannot be right.
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
    """The dimension as the proof sees it: what its ranks have in common."""
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
    """The operations of a stage that some other rank does not have."""
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


def draw_apart(ranks: Ranks, program: Program) -> Program:
    """`program` with random numbers of its own for each rank's part of a value. All ranks call it.

    Raises PipelineError if forward does not draw at the same places on all ranks.
    """
    dimensions = [name for name in SHARING if ranks.mesh.size(name) > 1]
    if not dimensions:
        return program
    texts = {name: _texts(program, name) for name in dimensions}
    apart = {name: _differ(ranks, name, [found[name] for found in gathered(ranks, texts)]) for name in dimensions}
    numbers = iter(range(len(next(iter(apart.values())))))

    def of_stage(stage: StageProgram) -> StageProgram:
        own = [next(numbers) for _ in drawing(stage.pieces["F"])]
        along = [[name for name in dimensions if apart[name][number]] for number in own]
        return replace(stage, pieces={**stage.pieces, "F": with_draws_apart(stage.pieces["F"], along)})

    return replace(program, stages=tuple(map(of_stage, program.stages)))


def _texts(program: Program, dimension: str) -> list[str]:
    shares = Shares(dimension, lambda name: program.placement(name)[dimension] == SHARD, program.model.constants)
    return [text for stage in program.stages for text in shares.of_draws(stage.pieces["F"])]


def _differ(ranks: Ranks, dimension: str, texts: Sequence[Sequence[str]]) -> list[bool]:
    """Whether each draw is for a part of a value along `dimension`, on any rank: `texts` are those of all ranks."""
    counts = list(map(len, texts))
    if len(set(counts)) > 1:
        raise PipelineError(
            f"forward draws random numbers at {counts} places on ranks {list(ranks.members)}; ranks that share a "
            "microbatch draw at the same ones. Let forward draw on every rank, or on none."
        )
    by_place: dict[tuple[tuple[str, int], ...], list[Sequence[str]]] = {}
    for rank, found in zip(ranks.members, texts, strict=True):
        place = {name: at for name, at in ranks.mesh.place_of(rank).items() if name != dimension}
        by_place.setdefault(tuple(place.items()), []).append(found)
    groups = [list(zip(*group, strict=True)) for group in by_place.values()]
    return [any("" in of or len(set(of)) > 1 for of in of_draw) for of_draw in zip(*groups, strict=True)]
