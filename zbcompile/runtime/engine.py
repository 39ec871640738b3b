"""The common part of all engines: the input of a step, a process's part of a program, of which one step may mix several
for microbatches of other shapes and answers to what forward asks, and the runs of its ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from zbcompile.distributed.mesh import BATCHES
from zbcompile.distributed.ranks import Ranks
from zbcompile.distributed.transport import ReceiveBuffers, Transport
from zbcompile.errors import PipelineError
from zbcompile.model.losses import Losses
from zbcompile.model.seeds import microbatch_seed
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.passes.torch_names import dtype_named
from zbcompile.program.output import Output
from zbcompile.program.program import Program
from zbcompile.runtime.action_loop import Observer, RankRun, StepRecorder
from zbcompile.runtime.data_parallel import Early, Sharded, StageUpdates, Sum
from zbcompile.runtime.gradient_sums import Gradients
from zbcompile.runtime.labels import Labels
from zbcompile.runtime.rank_plan import RankPlan, Stages, plan_rank
from zbcompile.runtime.stage_plan import CompiledStage
from zbcompile.runtime.stage_run import StageRun
from zbcompile.runtime.vocabulary_collectives import Collectives
from zbcompile.runtime.vocabulary_parameters import VocabularyExecutable
from zbcompile.schedules import Schedule, with_updates
from zbcompile.torch_private import profiler_is_on


@dataclass(frozen=True)
class StepInput:
    """One step: the tensors of each microbatch by input path, which step it is, how losses combine, what records it,
    how a GradScaler scales the loss, the parameters that replicas update in parts, the optimizers that update stage by
    stage, those whose last update is still to be validated, and whether the rank goes on before all have ended the
    step."""

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


@dataclass(frozen=True)
class Executable:
    """A program with this process's part of it: its compiled stages, the plans of its ranks, their buffers, and over
    whom gradients are summed.

    `variants`, if there are any, are the stages for each microbatch: the graphs of its own shapes and answers to
    forward's questions; `returned` then says for each what it returns. `beside` are all stages that run in the same
    step: for some microbatches, or in other replicas. `number` is how many programs the pipeline has made before, alike
    on all ranks.
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
        """The schedule and the plans with the optimizer's actions of these kinds; each is made once."""
        if kinds not in self.ordered:
            lowered = with_updates(self.program.lowered, kinds)
            plans = tuple(plan.with_updates(lowered.programs[plan.rank]) for plan in self.plans)
            self.ordered[kinds] = lowered.schedule, plans
        return self.ordered[kinds]


Made = dict[str, dict[int, torch.Tensor]]  # by leaf of the output, then by microbatch


class StepResult(NamedTuple):
    """The losses of the microbatches of all replicas, and the leaves of the model's output that this process's stages
    have made, if the program returns them."""

    losses: Losses
    made: Made


@dataclass(frozen=True)
class StepRuns:
    """The state that the runs of this process's ranks share during one step.

    Microbatches are numbered over all replicas: together they train as one pipeline on the concatenated batch.
    """

    executable: Executable
    given: StepInput
    ranks: Ranks
    transport: Transport
    recorder: Observer | None

    def run_of(self, plan: RankPlan, gradients: Gradients, updates: StageUpdates | None = None) -> RankRun:
        """The run of the rank that `plan` is for, whose optimizer's actions `updates` does."""
        executable, microbatches = self.executable, self.given.microbatches
        runs = {
            stage: StageRun(executable.stages[stage], gradients, microbatches, self._loss_factor, self._seeds)
            for stage in executable.program.stages_of(plan.rank)
        }
        for stage, run in runs.items():
            run.variants = [stages[stage] for stages in executable.variants]
        observe = Labels(self.recorder) if profiler_is_on() else self.recorder
        position, transport = self.ranks.watch.position, self.transport
        if executable.vocabulary is None or self._collectives is None:
            return RankRun(plan, runs, transport, position, observe, updates=updates)
        shard = executable.vocabulary.begin(
            plan.rank, gradients, microbatches, self._loss_factor, transport, self._collectives
        )
        return RankRun(plan, runs, shard, position, observe, shard, updates)

    @cached_property
    def _collectives(self) -> Collectives | None:
        return self.executable.vocabulary.collectives() if self.executable.vocabulary else None

    @cached_property
    def _seeds(self) -> list[int]:
        count = self.executable.program.schedule.microbatches
        first = self.ranks.mesh.index(*BATCHES) * count
        return [microbatch_seed(self.given.index, i, self.given.seed) for i in range(first, first + count)]

    @cached_property
    def _loss_factor(self) -> torch.Tensor:
        """The gradient of the step's loss by a microbatch's: 1/m enters the backward here, as in eager's (loss / m)."""
        program, given = self.executable.program, self.given
        one = torch.ones((), dtype=dtype_named(program.loss_dtype), device=self.executable.buffers.device)
        count = program.schedule.microbatches * self.ranks.replicas.count
        scaled = given.scale(one).to(one.dtype) if given.scale else one  # a GradScaler answers in float32
        return scaled / count if given.reduction == "mean" else scaled


def outputs_of(runs: Sequence[RankRun]) -> Made:
    """The leaves of the model's output that these ranks have made. Two copies of the model make one leaf."""
    made: Made = {}
    for stage in (stage for run in runs for stage in run.runs.values()):
        for name, parts in stage.outputs.items():
            made.setdefault(name, {}).update(parts)
    return made


def losses_of(run: RankRun) -> dict[int, torch.Tensor]:
    """The losses of the microbatches whose last stage ran here, after a check that nothing of the step is left."""
    for stage in run.runs.values():
        stage.check_empty()
    if run.vocabulary is not None:
        run.vocabulary.shard.check_empty()
        if run.vocabulary.is_root:
            return run.vocabulary.shard.losses
    return {i: loss for stage in run.runs.values() for i, loss in stage.losses.items()}


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
