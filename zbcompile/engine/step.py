"""One function runs a training step or an evaluation on the ranks of this process.

A process plays all ranks of a pipeline, in a deterministic interleaving, or one rank of a group.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.in_flight import complete, keep_in_flight
from zbcompile.distributed.mesh import BATCHES, broadcast
from zbcompile.distributed.ranks import Ranks
from zbcompile.distributed.transport import Transport, empty
from zbcompile.engine.executable import Executable, Losses, Outputs, StepInput
from zbcompile.engine.first_step_check import FirstStepCheck, written_buffers
from zbcompile.engine.gradients import Gradients, reduce_tied
from zbcompile.engine.optimizer_parameters import LATE
from zbcompile.engine.rank import RankRun
from zbcompile.engine.replicas import Reduction
from zbcompile.engine.stage import LOOKUPS, SHARD, StageRun
from zbcompile.engine.step_agreement import integer_marks, require_same_integers
from zbcompile.engine.vocabulary import ShardStep
from zbcompile.errors import PipelineError
from zbcompile.model.seeds import microbatch_seed
from zbcompile.passes import gpu
from zbcompile.passes.torch_private import profiler_is_on
from zbcompile.profiling.observation import ActionTimes
from zbcompile.schedules import Schedule
from zbcompile.schedules.ir.actions import Action

OVERFLOW = (
    "more tokens chose the experts of one rank than an exchange has room for, so that the step"
    " would leave some out. Pass a larger factor= to ExpertExchange: the number of its ranks is"
    " enough for any routing."
)


@dataclass
class Engine:
    """Runs executables on `ranks`."""

    ranks: Ranks

    def __post_init__(self) -> None:
        mesh = self.ranks.mesh
        self.check = FirstStepCheck(self.ranks) if mesh.beside("pp", "dp") else None
        self.replica = mesh.index(*BATCHES)  # among those with batches of their own

    def run_step(
        self,
        executable: Executable,
        step: StepInput,
        parameters: Mapping[str, nn.Parameter],
        channels: Schedule | None = None,
    ) -> tuple[Losses, Outputs]:
        """Runs the ranks of this process, then what happens once at the end of a step.

        Returns the losses of the microbatches of all replicas, and the leaves of the model's output
        that this process has, if the program returns them. Gradients accumulate into `parameters`.
        The caller's random state is as before.

        Args:
            channels: The schedule whose channels are opened if there are none yet. An evaluation
                opens those of the training step too.
        """
        program, ranks = executable.program, self.ranks
        for slices in step.slices:
            if slices.zero:
                slices.begin(program)
        if self.check is not None and program.trains:
            self.check.begin(executable)
        sums, reductions = executable.gradients, dict[int, Reduction]()
        for rank, plan in executable.sums.items():
            if rank not in sums:
                sums[rank] = Gradients(parameters, program.shared, program.choices)
                sums[rank].observe = self.check.note if self.check else None
            reductions[rank] = Reduction(ranks.replicas, plan, sums[rank], step.slices)
        schedule, number = channels or program.schedule, executable.first.number
        transport = ranks.transport(schedule, program.schedule.microbatches, number)
        runs, times = self._rank_runs(executable, step, reductions, transport)
        losses, outputs = Losses(()), Outputs()
        waiting = ranks.waiting
        generators = gpu.forked_generators(ranks.device) if executable.draws else nullcontext()
        with generators, torch.no_grad():
            interleave(runs)
            with waiting("the last sends"):
                for run in runs:
                    if run.collectives is not None:
                        run.collectives.finish(run.rank)
                transport.finish()
            if program.trains:
                self._complete_gradients(executable, step, reductions)
                with waiting("the end"):
                    losses = self._share_losses(executable, step, runs, reductions)
            if step.outputs:
                with waiting("the exchange of outputs"):
                    outputs = self._collect_outputs(executable, step, runs)
        if step.recorder is not None and times is not None:
            with waiting("the end"):
                step.recorder.end(times)
        return losses, outputs

    def _rank_runs(
        self,
        executable: Executable,
        step: StepInput,
        reductions: Mapping[int, Reduction],
        transport: Transport,
    ) -> tuple[list[RankRun], ActionTimes | None]:
        """Returns the ranks of this process with their stages and their shards of an output layer,
        ready to run, and what records their times."""
        program, ranks, count = executable.program, self.ranks, len(executable.graphs)
        ops = {"OPT"} if step.updates else set[str]()
        if any(reduction.reduces for reduction in reductions.values()):
            ops.add("REDUCE")
        order, programs = executable.ordered(frozenset(ops))
        times = step.recorder.begin(program, order) if step.recorder else None
        vocabulary = executable.first.vocabulary
        collectives = None if vocabulary is None else vocabulary.collectives(transport)
        # 1/m enters the backward as the gradient of the loss, as in eager's (loss / m).
        loss_factor = torch.ones((), dtype=executable.loss_dtype, device=ranks.device)
        if step.reduction == "mean":
            loss_factor /= count * ranks.replicas.count
        # Microbatches are numbered over all replicas, which train as one pipeline.
        number, seeds = self.replica * count, [0] * count
        if executable.draws:
            seeds = [microbatch_seed(step.index, number + i, step.seed) for i in range(count)]
        runs = list[RankRun]()
        for rank_program in programs:
            rank, rows = rank_program.rank, None
            reduction, numbers = reductions[rank], executable.sums[rank].complete
            stages = {i: [graphs.stages[i] for graphs in executable.graphs] for i in numbers}
            if vocabulary is not None:
                stages |= {i: [shard] * count for i, shard in vocabulary.shards[rank].items()}
                shards = vocabulary.rows  # in one process rows of whole sums
                rows = slice(*shards.bounds[rank]) if shards.rank is None else None
            values = reduction.gradients, step.microbatches, loss_factor, seeds
            stage_runs = {
                i: StageRun(microbatches, *values, rows if i < 0 else None)
                for i, microbatches in stages.items()
            }
            if collectives is not None:
                shard = ShardStep(min(numbers), stage_runs[SHARD], stage_runs.get(LOOKUPS))
                collectives.shards[rank] = shard
            position, hooks = ranks.watch.position, _hooks(step, reduction, stage_runs)
            more = times, hooks, collectives, profiler_is_on()
            runs.append(RankRun(rank_program, stage_runs, transport, position, *more))
        return runs, times

    def _complete_gradients(
        self, executable: Executable, step: StepInput, reductions: Mapping[int, Reduction]
    ) -> None:
        """Adds the gradients that stages and replicas share, and updates what only the end of the
        step completes."""
        program, waiting = executable.program, self.ranks.waiting
        if program.shared:
            with waiting("the sum of tied gradients"):
                gradients = {rank: reduction.gradients for rank, reduction in reductions.items()}
                reduce_tied(program, self.ranks, gradients)
        with waiting("the end of the sums of gradients"):
            for reduction in reductions.values():
                reduction.finish()
                reduction.gradients.flush()
        if sums := executable.first.sums:
            with waiting("the buffers of the first replica"):  # as DistributedDataParallel does
                for name, buffer in written_buffers(executable).items():
                    if name in sums:
                        broadcast([buffer], sums[name].group)
        with waiting("the update of what the end completes"):
            for update in step.updates:
                update(LATE)

    def _share_losses(
        self,
        executable: Executable,
        step: StepInput,
        runs: Sequence[RankRun],
        reductions: Mapping[int, Reduction],
    ) -> Losses:
        """Returns the losses of all microbatches of all replicas.

        Each loss has one owner; the other ranks add zeros, which changes no bit. A rank that reads
        them ends its step only once all ranks have run their passes. So no rank updates its
        parameters although another one has failed.
        """
        ranks, mesh, count = self.ranks, self.ranks.mesh, len(executable.graphs)
        vocabulary = executable.first.vocabulary  # whose shards all know the loss
        losses = {
            microbatch: loss
            for run in runs
            for microbatch, loss in run.losses().items()
            if vocabulary is None or run.rank == vocabulary.ends.last
        }
        if ranks.group is None:
            return Losses([losses[i].detach() for i in range(count)])
        # [replicas x microbatches, tp]: as every rank along "tp" computed them
        shape = ranks.replicas.count * count, mesh.size("tp")
        table = torch.zeros(shape, dtype=executable.loss_dtype, device=ranks.device)
        for microbatch, loss in losses.items():
            table[ranks.replicas.rank * count + microbatch, mesh.index("tp")].copy_(loss)
        fits = [fit for run in runs for stage in run.runs.values() for fit in stage.fits]
        overflow = table.new_zeros(1) + (torch.stack(fits).logical_not().sum() if fits else 0)
        marks = integer_marks(step.microbatches, mesh, table)
        shared = torch.cat([table.view(-1), overflow, marks.view(-1)])
        work = dist.all_reduce(shared, group=ranks.everyone, async_op=True)
        values, overflow, all_marks = shared.split([table.numel(), 1, marks.numel()])

        def wait() -> None:
            with ranks.watch.outside_calls("the losses of all ranks"):
                complete(work)

        require = partial(require_same_integers, ranks, all_marks.view(marks.shape))
        result = Losses(
            values.view(shape)[:, 0].unbind(), wait, require if ranks.count > 1 else None
        )
        check = self.check if self.check is not None and self.check.names else None
        if check is not None or not step.ahead or executable.may_overflow:
            result.read()
        else:
            keep_in_flight(work)
        if executable.may_overflow and overflow:
            raise ranks.refusal(OVERFLOW)
        if check is not None:
            parameters = reductions[ranks.local[0]].gradients.parameters
            check.compare(executable, parameters, values.view(shape))
        return result

    def _collect_outputs(
        self, executable: Executable, step: StepInput, runs: Sequence[RankRun]
    ) -> Outputs:
        """Returns the leaves of the model's output, on every rank or on that of the last stage."""
        program, ranks, on_all = executable.program, self.ranks, step.outputs == "all"
        outputs: Outputs = {}
        for stage_run in (stage_run for run in runs for stage_run in run.runs.values()):
            for leaf, values in stage_run.outputs.items():
                outputs.setdefault(leaf, {}).update(values)
        if ranks.group is None or (program.vocabulary is not None and on_all):
            return outputs  # every shard of an output layer computes all of it
        last = program.rank_of(program.schedule.stages - 1)
        for i, output in enumerate(executable.outputs):
            for leaf, (stage, spec) in sorted(output.made.items()):
                source = program.rank_of(stage, i)
                if on_all or source != last:
                    is_source = ranks.rank == source
                    values = outputs.setdefault(leaf, {})
                    values[i] = values[i].contiguous() if is_source else empty(spec, ranks.device)
                    ranks.broadcast(values[i], source)
        return outputs


def _hooks(
    step: StepInput, reduction: Reduction, stages: Mapping[int, StageRun]
) -> dict[str, Callable[[int], None]]:
    """Returns what a rank does for a stage within a step, by operation."""

    def reduce(stage: int) -> None:
        reduction.start(stage)
        stages[stage].accumulators.clear()  # the sum may be freed once it is divided

    def update(stage: int) -> None:
        reduction.finish_stage(stage)
        reduction.gradients.flush(reduction.plan.complete[stage])
        for act in step.updates:
            act(stage)

    return {"REDUCE": reduce, "OPT": update}


def interleave(ranks: Sequence[RankRun]) -> None:
    """Runs the ranks in turn, each until it must wait, until all have ended.

    Raises PipelineError if none of them can go on.
    """
    running = [(run, run.run()) for run in ranks]
    before: list[tuple[int, Action]] = []
    while running:
        unfinished, waiting = [], []
        for run, actions in running:
            if len(ranks) > 1:
                run.position.rank = run.rank  # a process of its own has a number in the whole mesh
            action = next(actions, None)
            if action is not None:
                unfinished.append((run, actions))
                waiting.append((run.rank, action))
        if waiting and waiting == before:
            stuck = ", ".join(f"rank {rank} at {action}" for rank, action in waiting)
            raise PipelineError(f"the schedule deadlocks: {stuck}")
        before, running = waiting, unfinished
