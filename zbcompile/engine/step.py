"""One function runs an executable, a training step or a forward alone, on the ranks of this
process: all of them in a deterministic interleaving, or the one that this process is of a group.

A `StepRun` is what their runs share, and the actions that a step has once, one method for each
kind: those of the optimizer for every stage, and the exchanges, which all ranks do together before
or behind all other actions. An exchange happens once all ranks have come to it; it is done once for
all ranks of this process, which need no message among each other.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.batches.losses import Losses
from zbcompile.distributed.mesh import BATCHES, broadcast
from zbcompile.distributed.packing import empty
from zbcompile.distributed.ranks import Ranks, Traffic
from zbcompile.distributed.transport import Transport
from zbcompile.distributed.under_way import complete, outlives_its_step
from zbcompile.engine.executable import Executable, Made, StepInput, StepResult
from zbcompile.engine.first_step_check import FirstStepCheck, written_buffers
from zbcompile.engine.gradients import Gradients
from zbcompile.engine.rank import ActionLabels, Observer, RankRun, sum_losses
from zbcompile.engine.rank_plan import RankPlan
from zbcompile.engine.replicas import Reduction, unobserved
from zbcompile.engine.slice import LATE
from zbcompile.engine.stage import StageRun
from zbcompile.engine.stage_plan import LOOKUPS, SHARD, CompiledStage
from zbcompile.engine.step_agreement import integer_marks, require_same_integers
from zbcompile.engine.tied import TiedSums
from zbcompile.engine.vocabulary import Collectives, ShardStep
from zbcompile.engine.vocabulary_parameters import VocabularyExecutable
from zbcompile.errors import PipelineError
from zbcompile.faults.watchdog import LocalWatch, Watch
from zbcompile.model.seeds import microbatch_seed, undisturbed
from zbcompile.schedules import Schedule
from zbcompile.schedules.ir.actions import EXCHANGES, Action
from zbcompile.schedules.ir.kinds import EXCHANGE_OPS
from zbcompile.torch_private import profiler_is_on


@dataclass
class Engine:
    """Runs executables on `ranks`."""

    ranks: Ranks

    def __post_init__(self) -> None:
        self.check = FirstStepCheck(self.ranks) if self.ranks.mesh.beside("pp", "dp") else None

    def run(
        self,
        executable: Executable,
        given: StepInput,
        parameters: Mapping[str, nn.Parameter],
        channels: Schedule | None = None,
    ) -> StepResult:
        """Carry out the actions of this process's ranks; gradients accumulate into `parameters`.
        `channels` is the schedule whose channels are opened if there are none yet: the training
        step's, which a forward opens, too.

        Does not advance the caller's random state.
        """
        program, ranks = executable.program, self.ranks
        for each in (each for each in given.slices if each.divided):
            each.begin(program)
        if self.check is not None and program.trains:
            self.check.begin(executable)
        reductions = {
            plan.rank: self._reduction(plan, executable, given, parameters)
            for plan in executable.plans
        }
        buffers, count = executable.first.buffers, program.schedule.microbatches
        opened, number = channels or program.schedule, executable.first.number
        traffic = Traffic(opened, count, number)
        transport = ranks.transport(traffic, buffers)
        step = StepRun(executable, given, ranks, self.check, reductions)
        schedule, plans = executable.plans_for(step.kinds)
        step.begin(
            plans, transport, given.recorder.begin(program, schedule) if given.recorder else None
        )
        with undisturbed(ranks.device), torch.no_grad():
            interleave(step.runs)
        step.runs.clear()  # they know the step, and would live until the collector comes
        if given.recorder is not None:
            with ranks.watch.position.waiting("the end"):
                given.recorder.end()
        return StepResult(step.losses, step.made)

    def _reduction(
        self,
        plan: RankPlan,
        executable: Executable,
        given: StepInput,
        parameters: Mapping[str, nn.Parameter],
    ) -> Reduction:
        program = executable.program
        if plan.rank not in executable.gradients:
            executable.gradients[plan.rank] = Gradients(parameters, program.shared, program.choices)
        observe = unobserved if self.check is None else self.check.note
        return Reduction(
            self.ranks.replicas, plan.sums, executable.gradients[plan.rank], given.slices, observe
        )


def interleave(ranks: Sequence[RankRun]) -> None:
    """Run the ranks in turn, each until it must wait, until all are done."""
    running = [(run, run.run()) for run in ranks]
    before: list[tuple[int, Action]] = []
    while running:
        still, waiting = [], []
        for run, program in running:
            if len(ranks) > 1:
                run.position.rank = run.rank  # a process of its own has a number in the whole mesh
            action = next(program, None)
            if action is not None:
                still.append((run, program))
                waiting.append((run.rank, action))
        if waiting and waiting == before:
            stuck = ", ".join(f"rank {rank} at {action}" for rank, action in waiting)
            raise PipelineError(f"the schedule deadlocks: {stuck}")
        before, running = waiting, still


OVERFLOW = (
    "more tokens chose the experts of one rank than an exchange has room for, so that the step"
    " would leave some out. Pass a larger factor= to ExpertExchange: the number of its ranks is"
    " enough for any routing."
)


@dataclass
class StepRun:
    """`runs` are those of this process's ranks, `reductions` the sums of their gradients, by rank.
    `check` compares what other ranks compute as well, None if none does; `collectives` are those of
    a sharded output layer. `come` are the ranks that have come to each exchange, `done` the
    exchanges that have begun. `losses` are there after LOSS, `made`, the leaves of the model's
    output by microbatch, after OUTPUT, on ranks that were to have them.

    Microbatches are numbered over all replicas: together they train as one pipeline on the
    concatenated batch.
    """

    executable: Executable
    given: StepInput
    ranks: Ranks
    check: FirstStepCheck | None
    reductions: Mapping[int, Reduction]
    runs: list[RankRun] = field(default_factory=list)
    collectives: Collectives | None = None
    losses: Losses = field(default_factory=lambda: Losses(()))
    made: Made = field(default_factory=dict)
    come: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.program = self.executable.program
        self.trains = self.program.trains
        self.reduces = any(each.reduces for each in self.reductions.values())

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of actions that the step has once per stage or rank."""
        return frozenset(op for op, once in ONCE_ACTIONS.items() if once.is_needed(self))

    @property
    def looks_up_rows(self) -> bool:
        """Whether a stage looks up an embedding whose rows other processes train."""
        return self.ranks.group is not None and self.trains and bool(self.program.tied)

    def begin(
        self, plans: Sequence[RankPlan], transport: Transport, observer: Observer | None
    ) -> None:
        """Make the runs of the ranks that have these plans."""
        observe = ActionLabels(observer or Observer()) if profiler_is_on() else observer
        vocabulary = self.executable.first.vocabulary
        self.collectives = collectives = (
            None if vocabulary is None else vocabulary.collectives(transport)
        )
        graphs, position = self.executable.graphs, self.ranks.watch.position
        for plan in plans:
            gradients = self.reductions[plan.rank].gradients
            runs = {
                i: self._run_of([each.stages[i] for each in graphs], gradients) for i in plan.stages
            }
            if vocabulary is not None and collectives is not None:
                runs |= self._shards(vocabulary, plan.rank, gradients)
                collectives.shards[plan.rank] = ShardStep(
                    plan.stages[0], runs[SHARD], runs.get(LOOKUPS)
                )
            self.runs.append(RankRun(plan, runs, transport, position, observe, shared=self))

    def _shards(
        self, vocabulary: VocabularyExecutable, rank: int, gradients: Gradients
    ) -> dict[int, StageRun]:
        shards, count = vocabulary.shards[rank], len(self.executable.graphs)
        rows = vocabulary.rows.within_sums(rank)
        return {
            number: self._run_of([shard] * count, gradients, rows)
            for number, shard in shards.items()
        }

    def _run_of(
        self, stages: Sequence[CompiledStage], gradients: Gradients, rows: slice | None = None
    ) -> StageRun:
        return StageRun(
            stages, gradients, self.given.microbatches, self._loss_factor, self._seeds, rows
        )

    @cached_property
    def _seeds(self) -> list[int]:
        count = self.program.schedule.microbatches
        first = self.ranks.mesh.index(*BATCHES) * count
        return [
            microbatch_seed(self.given.index, i, self.given.seed)
            for i in range(first, first + count)
        ]

    @cached_property
    def _loss_factor(self) -> torch.Tensor:
        """The gradient of the step's loss by a microbatch's: 1/m enters the backward here, as in
        eager's (loss / m)."""
        program, given = self.program, self.given
        one = torch.ones(
            (), dtype=self.executable.loss_dtype, device=self.executable.first.buffers.device
        )
        count = program.schedule.microbatches * self.ranks.replicas.count
        return one / count if given.reduction == "mean" else one

    def ready(self, op: str, rank: int) -> bool:
        """A rank has come to an exchange: whether all of this process have; processes wait for each
        other inside of it."""
        come = self.come[op]
        come.add(rank)
        return len(come) == len(self.runs)

    def carry_out(self, action: Action, rank: int) -> None:
        """Do it: an exchange once, for all ranks of this process. If replicas take different steps,
        nothing is exchanged between them, and all ranks raise once their passes have run."""
        op, agreement = action.op, self.given.agreement
        if op in self.done:
            return
        if op in OVER_REPLICAS and agreement is not None and agreement.differs():
            if op == "LOSS":
                agreement.require()
        elif op not in EXCHANGES:
            ONCE_ACTIONS[op].run(self, self.reductions[rank], action.stage)
        else:
            self.done.add(op)
            with self.ranks.watch.position.waiting(EXCHANGE_OPS[op]):
                ONCE_ACTIONS[op].run(self)

    # For a stage

    def _act(self, op: str, stage: int) -> None:
        for act in self.given.actions.get(op, ()):
            act(stage)

    def _reduce(self, reduction: Reduction, stage: int) -> None:
        reduction.start(stage)
        for run in self.runs:
            if stage in run.runs:
                run.runs[
                    stage
                ].accumulators.clear()  # the sum may be freed as soon as it is divided

    def _update_stage(self, reduction: Reduction, stage: int) -> None:
        reduction.finish_stage(stage)
        reduction.gradients.settle(reduction.plan.complete[stage])
        self._act("OPT", stage)

    # For all ranks together

    def _gather_rows(self) -> None:
        vocabulary = self.executable.first.vocabulary
        assert vocabulary is not None
        assert vocabulary.group is not None
        vocabulary.rows.gather_lookups(self._own_gradients, self.program.tied, vocabulary.group)

    def _drain(self) -> None:
        for run in self.runs:
            if self.collectives is not None:
                self.collectives.finish(run.rank)
            run.transport.finish()

    def _sum_tied(self) -> None:
        gradients = {rank: each.gradients for rank, each in self.reductions.items()}
        TiedSums(self.program, self.ranks, gradients).run()
        vocabulary = self.executable.first.vocabulary
        if vocabulary is not None and vocabulary.group is not None and self.looks_up_rows:
            vocabulary.rows.share_lookups(self._own_gradients, self.program.tied, vocabulary.group)

    @property
    def _own_gradients(self) -> Gradients:
        """Those of the rank that this process is."""
        (reduction,) = self.reductions.values()
        return reduction.gradients

    def _end_sums(self) -> None:
        for reduction in self.reductions.values():
            reduction.finish()
            reduction.gradients.settle()

    def _share_buffers(self) -> None:
        """Replicas continue with the first one's, as under DistributedDataParallel."""
        for name, buffer in written_buffers(self.executable).items():
            if name in self.executable.first.sums:
                broadcast([buffer], self.executable.first.sums[name].group)

    def _share_losses(self) -> None:
        """Exchange the losses. A rank that waits for them ends its step only once all ranks have
        run their passes, so that none updates its parameters although another rank has failed."""
        own = sum_losses(run.losses() for run in self.runs)
        missing = self._missing()
        if self.ranks.group is None:
            self.losses = Losses(
                [own[i].detach() for i in range(self.program.schedule.microbatches)]
            )
            return
        check = self.check if self.check is not None and self.check.names else None
        inputs = self.given.microbatches
        shared, left_out, marks, work = share_losses(
            self.executable, own, self.ranks, missing, inputs
        )
        require = (
            partial(require_same_integers, self.ranks, marks) if self.ranks.count > 1 else None
        )
        self.losses = Losses(shared[:, 0].unbind(), partial(_wait, self.ranks.watch, work), require)
        if check is not None or not self.given.ahead or self.executable.may_overflow:
            self.losses.read()
        else:
            outlives_its_step(work)
        if self.executable.may_overflow and left_out:
            raise self.ranks.refusal(OVERFLOW)
        if check is not None:
            check.compare(self.executable, self.reductions[self.ranks.local[0]].results(), shared)

    def _missing(self) -> torch.Tensor | int:
        """How many exchanges between experts had no room for all tokens of this process."""
        fits = [each for run in self.runs for stage in run.runs.values() for each in stage.fits]
        return torch.stack(fits).logical_not().sum() if fits else 0

    def _collect_outputs(self) -> None:
        """Every rank, or only that of the last stage, gets the leaves that others have made."""
        program, ranks, everywhere = self.program, self.ranks, self.given.outputs == "all"
        for run in self.runs:
            for name, parts in run.outputs():
                self.made.setdefault(name, {}).update(parts)
        if ranks.group is None or (program.vocabulary is not None and everywhere):
            return  # every shard of an output layer has made all of it
        last = program.rank_of(program.schedule.stages - 1)
        for i, output in enumerate(self.executable.outputs):
            for name, (stage, spec) in sorted(output.made.items()):
                source = program.rank_of(stage, i)
                if everywhere or source != last:
                    own = self.made.setdefault(name, {})
                    own[i] = (
                        own[i].contiguous() if ranks.rank == source else empty(spec, ranks.device)
                    )
                    ranks.broadcast(own[i], source)


def _has(op: str) -> Callable[[StepRun], object]:
    return lambda step: step.given.actions.get(op)


class OnceAction(NamedTuple):
    """Whether a step has actions of this kind, and what they do: for a stage, or for all ranks of
    this process."""

    is_needed: Callable[[StepRun], object]
    run: Callable[..., None]


OVER_REPLICAS = {"REDUCE", "OPT", "SYNC", "BUFFERS", "FINAL", "LOSS"}
ONCE_ACTIONS = {
    "VALIDATE": OnceAction(_has("VALIDATE"), lambda step, reduction, at: step._act("VALIDATE", at)),
    "GATHER": OnceAction(_has("GATHER"), lambda step, reduction, at: step._act("GATHER", at)),
    "REDUCE": OnceAction(lambda step: step.reduces, StepRun._reduce),
    "OPT": OnceAction(_has("OPT"), StepRun._update_stage),
    "ROWS": OnceAction(lambda step: step.looks_up_rows, StepRun._gather_rows),
    "DRAIN": OnceAction(lambda step: True, StepRun._drain),
    "TIE": OnceAction(
        lambda step: step.trains and (step.program.shared or step.looks_up_rows), StepRun._sum_tied
    ),
    "SYNC": OnceAction(lambda step: step.trains, StepRun._end_sums),
    "BUFFERS": OnceAction(
        lambda step: step.trains and step.executable.first.sums, StepRun._share_buffers
    ),
    "FINAL": OnceAction(_has("OPT"), lambda step: step._act("OPT", LATE)),
    "LOSS": OnceAction(lambda step: step.trains, StepRun._share_losses),
    "OUTPUT": OnceAction(lambda step: step.given.outputs, StepRun._collect_outputs),
}


def _wait(watch: LocalWatch | Watch, work: dist.Work) -> None:
    with watch.apart("the losses of all ranks"):
        complete(work)


def share_losses(
    executable: Executable,
    own: Mapping[int, torch.Tensor],
    ranks: Ranks,
    further: torch.Tensor | int = 0,
    inputs: Sequence[Mapping[str, torch.Tensor]] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dist.Work]:
    """Begin to give every rank the loss of every microbatch of all replicas, as every rank along
    "tp" computed it: a tensor [replicas x microbatches, tp]. With it, the sum over all ranks of a
    `further` number, on the device, and the checksums of all ranks' integer `inputs`.

    Each loss has one owner and the other ranks add zeros, which changes no bit.
    """
    count, mesh = len(executable.graphs), ranks.mesh
    losses = torch.zeros(
        (ranks.replicas.count * count, mesh.size("tp")),
        dtype=executable.loss_dtype,
        device=ranks.device,
    )
    for microbatch, loss in own.items():
        losses[ranks.replicas.rank * count + microbatch, mesh.index("tp")].copy_(loss)
    marks = integer_marks(inputs, mesh, losses)
    shared = torch.cat([losses.view(-1), (losses.new_zeros(1) + further).view(-1), marks.view(-1)])
    work = dist.all_reduce(shared, group=ranks.everyone, async_op=True)
    found, left_out, marked = shared.split([losses.numel(), 1, marks.numel()])
    return found.view(losses.shape), left_out[0], marked.view(marks.shape), work
