"""One step whose microbatches run different graphs: those of their own shapes and answers to what forward asks."""

from collections.abc import Sequence
from dataclasses import replace

from zbcompile.errors import PipelineError
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.program.program import Program
from zbcompile.runtime.engine import Executable
from zbcompile.runtime.rank_plan import plan_rank


def mix(own: Sequence[Executable], everywhere: Sequence[Executable], why: str) -> Executable:
    """The executable of a step in which microbatch i runs as `own[i]`, and those of other replicas as any of
    `everywhere`: programs of one schedule, with every parameter in the same place. `why` says in what they differ.

    Raises PipelineError if what runs at the end of the step cannot serve all of them.
    """
    first, distinct = own[0], list({id(each): each for each in everywhere}.values())
    if len(distinct) == 1:
        return first
    programs = [each.program for each in distinct]
    problem = _problem(programs, several=any(each is not first for each in own))
    if problem:
        raise PipelineError(
            f"the microbatches of this step differ in their {why}, and {problem}, so they cannot share a step. Put "
            "samples that are alike in that into one batch."
        )
    beside = tuple(each.stages for each in distinct)
    program = replace(first.program, stages=_trained_by_any(first.program, programs))
    if all(each is first for each in own):
        return replace(first, program=program, beside=beside)
    variants = tuple(each.stages for each in own)
    plans = tuple(plan_rank(program, plan.rank, first.stages, variants) for plan in first.plans)
    returned = tuple(each.program.returned for each in own)
    return replace(first, program=program, plans=plans, variants=variants, returned=returned, beside=beside)


def _problem(programs: Sequence[Program], several: bool) -> str:
    first = programs[0]
    for other in programs[1:]:
        if other.shared != first.shared or _shared_uses(other) != _shared_uses(first):
            return "train different parameters on several stages"
        if [stage.deferred for stage in other.stages] != [stage.deferred for stage in first.stages]:
            return "leave different sums over ranks to the end of the step"
        if (other.returned is None) != (first.returned is None):
            return "return different outputs"
        if other.loss_dtype != first.loss_dtype:
            return f"their losses are {first.loss_dtype} and {other.loss_dtype}"
        if several and other.manifest["vocabulary"] != first.manifest["vocabulary"]:
            return "compute the sharded output layer in different ways"
    return ""


def _shared_uses(program: Program) -> list[tuple[str, int]]:
    """The stages that train each parameter which several stages train."""
    return sorted((name, stage.stage) for stage in program.stages for name in stage.trained if name in program.shared)


def _trained_by_any(first: Program, programs: Sequence[Program]) -> tuple[StageProgram, ...]:
    """The stages of `first`, with the parameters that any of `programs` trains on them."""
    stages = zip(*(each.stages for each in programs), strict=True)
    trained = [tuple(dict.fromkeys(name for one in stage for name in one.trained)) for stage in stages]
    return tuple(replace(stage, trained=names) for stage, names in zip(first.stages, trained, strict=True))
