"""One function runs an executable, a training step or a forward alone, on the ranks of this process: all of them in a
deterministic interleaving, or the one that this process is of a group."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.model.seeds import undisturbed
from zbcompile.runtime.action_loop import RankRun
from zbcompile.runtime.data_parallel import Reduction, start_reduction
from zbcompile.runtime.engine import Executable, StepInput, StepResult
from zbcompile.runtime.equal_results import EqualResults
from zbcompile.runtime.gradient_sums import Gradients
from zbcompile.runtime.step_memory import StepMemory, refuse
from zbcompile.runtime.step_run import StepRun
from zbcompile.schedules import Action, Schedule


@dataclass
class Engine:
    """Runs executables on `ranks`."""

    ranks: Ranks

    def __post_init__(self) -> None:
        self.equal = EqualResults(self.ranks)

    def run(
        self,
        executable: Executable,
        given: StepInput,
        parameters: Mapping[str, nn.Parameter],
        channels: Schedule | None = None,
    ) -> StepResult:
        """Carry out the actions of this process's ranks; gradients accumulate into `parameters`. `channels` is the
        schedule whose channels are opened if there are none yet: the training step's, which a forward opens, too.

        Does not advance the caller's random state.
        """
        program, ranks, memory = executable.program, self.ranks, executable.memory
        for each in (each for each in given.slices if each.divided):
            each.begin(program)
        if program.output is None:
            self.equal.begin(program)
        reductions = [self._reduction(executable, given, parameters, rank) for rank in ranks.local]
        if memory is not None:
            _require_fixed(given)
            if given.agreement is not None:
                given.agreement.require()
            given = replace(given, microbatches=memory.stage(given.microbatches))
            for reduction, rank in zip(reductions, ranks.local, strict=True):
                stages = program.stages_of(rank)
                memory.hold(reduction.gradients, rank, [n for i in stages for n in program.stages[i].trained])
            if memory.graph is not None and given.recorder is None:
                return StepResult(memory.replay(), {})
        buffers, count = executable.first.buffers, program.schedule.microbatches
        opened, number = channels or program.schedule, executable.first.number
        transport = ranks.transport(opened, count, buffers, number, program.step.max_ctas)
        step = StepRun(executable, given, ranks, self.equal, reductions)
        schedule, plans = executable.with_updates(step.kinds)
        step.begin(plans, transport, given.recorder.begin(program, schedule) if given.recorder else None)
        with undisturbed(ranks.device), torch.no_grad():
            if memory is None:
                interleave(step.runs)
            else:
                _keep_memory(step, memory)
        step.runs.clear()  # they know the step, and would live until the collector comes
        if given.recorder is not None:
            with ranks.watch.position.waiting("the end"):
                given.recorder.end()
        return StepResult(step.losses if memory is None else memory.read_out(), step.made)

    def _reduction(
        self, executable: Executable, given: StepInput, parameters: Mapping[str, nn.Parameter], rank: int
    ) -> Reduction:
        program = executable.program
        gradients = Gradients(parameters, program.shared, program.choices)
        replicas, sums = self.ranks.replicas, executable.first.sums
        return start_reduction(replicas, program, rank, gradients, sums, given.slices, self.equal.note)


def _require_fixed(given: StepInput) -> None:
    """Raise PipelineError for what changes from step to step, which one recording cannot hold."""
    reasons = {
        "an optimizer updates parameters, or divides gradients, inside of it": any(given.actions.values()),
        "a GradScaler scales its loss": given.scale is not None,
    }
    refuse(reason for reason, holds in reasons.items() if holds)


def _keep_memory(step: StepRun, memory: StepMemory) -> None:
    """Run a step whose values have places; record it, if it is time, and replay the recording."""
    if step.given.recorder is not None or not memory.records():
        interleave(step.runs)
        memory.losses = step.losses
        return
    with memory.recording():
        interleave(step.runs)
    memory.losses, memory.holding = step.losses, step
    memory.replay()


def interleave(ranks: Sequence[RankRun]) -> None:
    """Run the ranks in turn, each until it must wait, until all are done."""
    running = {run.rank: (run, run.run()) for run in ranks}
    before: dict[int, Action] = {}
    while running:
        turns = {rank: _turn(*each, alone=len(ranks) == 1) for rank, each in running.items()}
        waiting = {rank: action for rank, action in turns.items() if action is not None}
        if waiting and waiting == before:
            stuck = ", ".join(f"rank {rank} at {action}" for rank, action in waiting.items())
            raise PipelineError(f"no rank can proceed: {stuck}; the schedule's order is not executable")
        before, running = waiting, {rank: running[rank] for rank in waiting}


def _turn(run: RankRun, program: Iterator[Action], alone: bool) -> Action | None:
    if not alone:
        run.position.rank = run.rank  # a process of its own has a number in the whole mesh
    return next(program, None)
