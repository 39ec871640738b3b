"""Random numbers (`zbcompile.passes.stage.draws`), decided by comparing the graphs of all ranks once for each program:
ranks that compute the same values draw the same numbers; ranks that compute different parts draw different ones."""

from collections.abc import Sequence
from dataclasses import replace

from zbcompile.distributed.agreement import gathered
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.placements import SHARD
from zbcompile.passes.stage.draws import Shares, drawing, with_draws_apart
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.program.program import Program

SHARING = ("tp", "cp")  # ranks along these share microbatches


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
