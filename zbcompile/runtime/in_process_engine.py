"""All ranks in this process, in a deterministic interleaving: each rank runs until its input is missing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zbcompile.distributed.clocks import clock_of
from zbcompile.distributed.ranks import LocalRanks
from zbcompile.errors import PipelineError
from zbcompile.model.losses import Losses
from zbcompile.model.seeds import undisturbed
from zbcompile.profiling.step_record import StepRecord
from zbcompile.program.program import Program
from zbcompile.runtime.action_loop import RankRun
from zbcompile.runtime.engine import Executable, StepInput, StepResult, StepRuns, losses_of, outputs_of
from zbcompile.runtime.gradient_buffers import Gradients
from zbcompile.runtime.recorder import Recorder, make_record
from zbcompile.runtime.sharded_updates import LATE
from zbcompile.runtime.shared_gradients import sum_shared_in_process
from zbcompile.runtime.stage_updates import StageUpdates
from zbcompile.schedules import Action, Schedule


@dataclass
class InProcess:
    """Runs the steps of all ranks."""

    ranks: LocalRanks
    last_step: StepRecord | None = None

    def carry_out(self, runs: Sequence[RankRun]) -> None:
        with undisturbed(self.ranks.device), torch.no_grad():
            interleave(runs)
        for run in runs:
            run.transport.finish()

    def begin_recording(self, program: Program, schedule: Schedule) -> Recorder:
        return Recorder(program, schedule, clock_of(self.ranks.device))

    def end_recording(self, recorder: Recorder) -> None:
        self.last_step = make_record(recorder, [recorder.seen()], in_process=True)

    def step(self, executable: Executable, given: StepInput, parameters: Mapping[str, nn.Parameter]) -> StepResult:
        program = executable.program
        gradients = [Gradients(parameters, program.shared, program.choices) for _ in self.ranks.local]
        updates = [StageUpdates(program, own, given.early, given.validating) for own in gradients]
        ordered = executable.with_updates(updates[0].kinds)
        recorder = self.begin_recording(program, ordered.lowered.schedule) if given.record else None
        buffers, number = executable.buffers, executable.number
        mailboxes = self.ranks.transport(program.schedule, program.schedule.microbatches, buffers, number)
        begin = StepRuns(executable, given, self.ranks, mailboxes, recorder)
        runs = [begin.run_of(*each) for each in zip(ordered.plans, gradients, updates, strict=True)]
        self.carry_out(runs)
        losses = {i: loss for run in runs for i, loss in losses_of(run).items()}
        sum_shared_in_process(program, gradients)
        for own in gradients:
            own.finish()
        for each in given.early:
            each.update(LATE)
        self.last_step = None
        if recorder is not None:
            self.end_recording(recorder)
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
