"""The input of a step, and a process's part of a program, of which one step may mix several for microbatches of other
shapes and answers to what forward asks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from zbcompile.distributed.transport import ReceiveBuffers
from zbcompile.errors import PipelineError
from zbcompile.model.losses import Losses
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.program.output import Output
from zbcompile.program.program import Program
from zbcompile.runtime.action_loop import StepRecorder
from zbcompile.runtime.data_parallel import Early, Sharded, Sum
from zbcompile.runtime.rank_plan import RankPlan, Stages, plan_rank
from zbcompile.runtime.stage_plan import CompiledStage
from zbcompile.runtime.vocabulary_parameters import VocabularyExecutable
from zbcompile.schedules import Schedule, with_updates


@dataclass(frozen=True)
class StepInput:
    """One step: the tensors of each microbatch by input path, which step it is, how losses combine, what records it,
    how a GradScaler scales the loss, the parameters that replicas update in parts, the optimizers that update stage by
    stage, those whose last update is still to be validated, whether the rank goes on before all have ended the step,
    and which ranks get the model's outputs: "all", "last" (that of the last stage) or none ("")."""

    microbatches: list[dict[str, torch.Tensor]]
    index: int
    seed: int
    reduction: str
    recorder: StepRecorder | None = None
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None
    sharded: Sequence[Sharded] = ()
    early: Sequence[Early] = ()
    validating: Sequence[Early] = ()
    ahead: bool = False
    outputs: str = ""


@dataclass(frozen=True)
class Executable:
    """A program with this process's part of it: its compiled stages, the plans of its ranks, their buffers, and over
    whom gradients are summed.

    `variants`, if there are any, are the stages for each microbatch: the graphs of its own shapes and answers to
    forward's questions; `returned` then says for each what it returns, as it does for a forward alone. `beside` are all
    stages that run in the same step: for some microbatches, or in other replicas. `number` is how many programs the
    pipeline has made before, alike on all ranks.
    """

    program: Program
    stages: Mapping[int, CompiledStage]
    plans: tuple[RankPlan, ...]
    buffers: ReceiveBuffers
    vocabulary: VocabularyExecutable | None
    sums: Mapping[str, Sum] = field(default_factory=dict)
    variants: tuple[Stages, ...] = ()
    returned: tuple[Output | None, ...] = ()
    beside: tuple[Stages, ...] = ()
    number: int = 0
    ordered: dict[frozenset[str], tuple[Schedule, tuple[RankPlan, ...]]] = field(init=False, default_factory=dict)

    def with_updates(self, kinds: frozenset[str]) -> tuple[Schedule, tuple[RankPlan, ...]]:
        """The schedule and the plans with the actions of these kinds, which a step has once; each is made once."""
        if kinds not in self.ordered:
            lowered = with_updates(self.program.lowered, kinds)
            plans = tuple(plan.with_updates(lowered.programs[plan.rank]) for plan in self.plans)
            self.ordered[kinds] = lowered.schedule, plans
        return self.ordered[kinds]

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What each microbatch returns; empty if that is a loss alone."""
        program = self.program
        every = self.returned or (program.output or program.returned,) * program.schedule.microbatches
        return tuple(each for each in every if each is not None)

    def ends_on(self, ranks: Sequence[int]) -> bool:
        """Whether the last stage is on one of these ranks."""
        return self.program.rank_of(self.program.schedule.stages - 1) in ranks


Made = dict[str, dict[int, torch.Tensor]]  # by leaf of the output, then by microbatch


class StepResult(NamedTuple):
    """The losses of the microbatches of all replicas, and the leaves of the model's output that this process's stages
    have made, if the program returns them."""

    losses: Losses
    made: Made


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
        if [stage.deferred for stage in other.stages] != [stage.deferred for stage in first.stages]:
            return "leave different sums over ranks to the end of the step"
        if (other.returned is None) != (first.returned is None):
            return "return different outputs"
        if other.loss_dtype != first.loss_dtype:
            return f"their losses are {first.loss_dtype} and {other.loss_dtype}"
        if several and other.manifest["vocabulary"] != first.manifest["vocabulary"]:
            return "compute the sharded output layer in different ways"
    return ""


def _trained_by_any(first: Program, programs: Sequence[Program]) -> tuple[StageProgram, ...]:
    """The stages of `first`, with the parameters that any of `programs` trains on them."""
    stages = zip(*(each.stages for each in programs), strict=True)
    trained = [tuple(dict.fromkeys(name for one in stage for name in one.trained)) for stage in stages]
    return tuple(replace(stage, trained=names) for stage, names in zip(first.stages, trained, strict=True))
