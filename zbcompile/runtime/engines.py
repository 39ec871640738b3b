"""The engines: all ranks in this process, in a deterministic interleaving, or this process as one rank of a group; and
how they run a forward-only program, for which nothing waits for B."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.mesh import broadcast
from zbcompile.distributed.packing import empty
from zbcompile.distributed.ranks import GroupRanks, LocalRanks, Ranks
from zbcompile.distributed.termination import forget
from zbcompile.errors import PipelineError
from zbcompile.model.losses import Losses
from zbcompile.model.seeds import undisturbed
from zbcompile.program.output import Output
from zbcompile.runtime.action_loop import RankRun
from zbcompile.runtime.data_parallel import LATE, Reduction, StageUpdates, start_reduction
from zbcompile.runtime.engine import Executable, Made, StepInput, StepResult, StepRuns, losses_of, outputs_of
from zbcompile.runtime.equal_results import EqualResults, written_buffers
from zbcompile.runtime.gradient_sums import Gradients
from zbcompile.runtime.shared_gradients import share_losses, sum_shared, sum_shared_in_process
from zbcompile.schedules import Action, Schedule


@dataclass
class InProcess:
    """Runs the steps of all ranks."""

    ranks: LocalRanks

    def carry_out(self, runs: Sequence[RankRun]) -> None:
        """Run the programs of this process's ranks to their ends. Does not advance the caller's RNG."""
        with undisturbed(self.ranks.device), torch.no_grad():
            interleave(runs)
        for run in runs:
            run.transport.finish()

    def step(self, executable: Executable, given: StepInput, parameters: Mapping[str, nn.Parameter]) -> StepResult:
        """Run one step; gradients accumulate into the parameters."""
        program = executable.program
        gradients = [Gradients(parameters, program.shared, program.choices) for _ in self.ranks.local]
        updates = [StageUpdates(program, own, given.early, given.validating) for own in gradients]
        schedule, plans = executable.with_updates(updates[0].kinds)
        observer = given.recorder.begin(program, schedule) if given.recorder else None
        buffers, number = executable.buffers, executable.number
        mailboxes = self.ranks.transport(program.schedule, program.schedule.microbatches, buffers, number)
        begin = StepRuns(executable, given, self.ranks, mailboxes, observer)
        runs = [begin.run_of(*each) for each in zip(plans, gradients, updates, strict=True)]
        self.carry_out(runs)
        losses = {i: loss for run in runs for i, loss in losses_of(run).items()}
        sum_shared_in_process(program, gradients)
        for own in gradients:
            own.settle()
        for each in given.early:
            each.update(LATE)
        if given.recorder is not None:
            given.recorder.end()
        found = [losses[i].detach() for i in range(program.schedule.microbatches)]
        return StepResult(Losses(found), outputs_of(runs))


def interleave(ranks: Sequence[RankRun]) -> None:
    """Run the ranks in turn, each until it must wait, until all are done."""
    running = {rank.rank: rank.run() for rank in ranks}
    before: dict[int, Action] = {}
    while running:
        turns = {rank: _turn(ranks[rank], program) for rank, program in running.items()}
        waiting = {rank: action for rank, action in turns.items() if action is not None}
        if waiting and waiting == before:
            stuck = ", ".join(f"rank {rank} at {action}" for rank, action in waiting.items())
            raise PipelineError(f"no rank can proceed: {stuck}; the schedule's order is not executable")
        before, running = waiting, {rank: running[rank] for rank in waiting}


def _turn(rank: RankRun, program: Iterator[Action]) -> Action | None:
    rank.position.rank = rank.rank
    return next(program, None)


@dataclass
class DistributedEngine:
    """Runs this rank's part of every step."""

    ranks: GroupRanks
    equal: EqualResults

    def step(self, executable: Executable, given: StepInput, parameters: Mapping[str, nn.Parameter]) -> StepResult:
        program, ranks = executable.program, self.ranks
        gradients = Gradients(parameters, program.shared, program.choices)
        buffers, number = executable.buffers, executable.number
        transport = ranks.transport(program.schedule, program.schedule.microbatches, buffers, number)
        for each in given.sharded:
            each.begin(program)
        if executable.vocabulary is not None:
            with ranks.watch.position.waiting("the rows of a tied embedding"):
                executable.vocabulary.begin_step(gradients, program.tied)
        reduction = start_reduction(ranks.replicas, program, ranks.rank, gradients, executable.sums, given.sharded)
        self.equal.begin(program)
        reduction.observe = self.equal.note
        updates = StageUpdates(program, gradients, given.early, given.validating, reduction)
        schedule, plans = executable.with_updates(updates.kinds)
        observer = given.recorder.begin(program, schedule) if given.recorder else None
        runs = StepRuns(executable, given, ranks, transport, observer)
        run = runs.run_of(plans[0], gradients, updates)
        self.carry_out([run])
        losses = losses_of(run)
        self._complete(executable, gradients, reduction)
        for early in given.early:
            early.update(LATE)
        with ranks.watch.position.waiting("the end"):
            if given.recorder is not None:
                given.recorder.end()
            results = reduction.results()
            shared, news, work = share_losses(program, losses, ranks, self.equal.has_news(executable, results))
            found = Losses(shared[:, 0].unbind(), partial(self._wait, work))
            if self.equal.pending or not given.ahead:
                found.read()
        if self.equal.pending and news:
            self.equal.compare(executable, results, shared)
        return StepResult(found, outputs_of([run]))

    def _wait(self, work: dist.Work) -> None:
        with self.ranks.watch.apart("the losses of all ranks"):
            work.wait()
        forget(work)

    def carry_out(self, runs: Sequence[RankRun]) -> None:
        (run,) = runs
        with undisturbed(self.ranks.device), torch.no_grad():
            for action in run.run():
                raise PipelineError(f"rank {self.ranks.rank} cannot run {action}: its input was never requested")
        with self.ranks.watch.position.waiting("the last sends"):
            run.transport.finish()

    def _complete(self, executable: Executable, gradients: Gradients, reduction: Reduction) -> None:
        """Sum the gradients that several ranks and replicas hold."""
        program, ranks = executable.program, self.ranks
        with ranks.watch.position.waiting("the sum of tied gradients"):
            sum_shared(program, gradients, ranks.rank, ranks.group)
        if executable.vocabulary is not None:
            with ranks.watch.position.waiting("the gradients of a tied embedding"):
                executable.vocabulary.end_step(gradients, program.tied)
        with ranks.watch.position.waiting("the sum over replicas"):
            reduction.finish()
            gradients.settle()
            _share_buffers(executable)


def _share_buffers(executable: Executable) -> None:
    """What forwards write into buffers: replicas continue with the first one's, as under DistributedDataParallel."""
    for name, buffer in written_buffers(executable).items():
        if name in executable.sums:
            broadcast([buffer], executable.sums[name].group)


Engine = InProcess | DistributedEngine  # what has the same methods


def make_engine(ranks: Ranks) -> Engine:
    """The engine that runs the steps of `ranks`."""
    if isinstance(ranks, GroupRanks):
        return DistributedEngine(ranks, EqualResults(ranks))
    assert isinstance(ranks, LocalRanks)
    return InProcess(ranks)


def run_forward(executable: Executable, given: StepInput, engine: Engine, channels: Schedule) -> Made:
    """The leaves of the output that this process's stages make. `channels` is the schedule of the training step, if
    there is one: channels that are opened now must serve it, too."""
    ranks, program = engine.ranks, executable.program
    observer = given.recorder.begin(program, program.schedule) if given.recorder else None
    transport = ranks.transport(channels, program.schedule.microbatches, executable.buffers, executable.number)
    begin = StepRuns(executable, given, ranks, transport, observer)
    runs = [begin.run_of(plan, Gradients({}, frozenset(), program.choices)) for plan in executable.plans]
    engine.carry_out(runs)
    if given.recorder is not None:
        given.recorder.end()
    shards = [run.vocabulary.shard for run in runs if run.vocabulary is not None]
    return outputs_of(runs) | {name: parts for shard in shards for name, parts in shard.outputs.items()}


def joined(made: Made, outputs: dict[int, Output]) -> dict[str, torch.Tensor]:
    """The leaves of `made` over these microbatches, whose rows are one batch; each program says what it returns."""
    chosen = {name: [parts[i] for i in outputs] for name, parts in made.items()}
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in chosen.items()}


def exchanged(
    own: dict[str, torch.Tensor], outputs: dict[int, Output], executable: Executable, ranks: Ranks, everywhere: bool
) -> dict[str, torch.Tensor] | None:
    """All leaves, on every rank or only on that of the last stage (None on others)."""
    program = executable.program
    if ranks.group is None:
        return own
    if program.vocabulary is not None and everywhere:
        return own  # every shard has made all of it
    last = program.rank_of(program.schedule.stages - 1)
    for name, (stage, _) in sorted(next(iter(outputs.values())).made.items()):
        source = program.rank_of(stage)
        if everywhere or source != last:
            own[name] = own[name].contiguous() if name in own else _empty(name, outputs, ranks)
            ranks.broadcast(own[name], source)
    return own if everywhere or ranks.rank == last else None


def _empty(name: str, outputs: dict[int, Output], ranks: Ranks) -> torch.Tensor:
    specs = [output.made[name][1] for output in outputs.values()]
    if len(specs) == 1:
        return empty(specs[0], ranks.device)
    rows = sum(spec.shape[0] for spec in specs)
    return empty(specs[0]._replace(shape=(rows, *specs[0].shape[1:])), ranks.device)
