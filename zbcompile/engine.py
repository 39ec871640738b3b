"""The two ways to run a step: all ranks inside this process, or this process as one rank of a group."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.errors import PipelineError
from zbcompile.faults import Position
from zbcompile.finish import share_loss, sum_shared, sum_shared_in_process, total_loss
from zbcompile.gradients import Gradients
from zbcompile.loop import RankRun
from zbcompile.program import Program
from zbcompile.record import Recorder, StepRecord
from zbcompile.schedules.actions import Action
from zbcompile.seeds import microbatch_seed, undisturbed
from zbcompile.stage_run import CompiledStage, StageRun
from zbcompile.transport import Channels, Mailboxes, PointToPoint, Transport
from zbcompile.watch import Alone, Watch


@dataclass(frozen=True)
class StepInput:
    """One step: the tensors of each microbatch by input path, which step it is, and how losses combine."""

    microbatches: list[dict[str, torch.Tensor]]
    index: int
    seed: int
    reduction: str
    record: bool


class Engine(Protocol):
    """Runs compiled steps. `local` are the ranks whose stages live in this process, `watch` guards what ranks do
    together."""

    @property
    def watch(self) -> Alone | Watch: ...
    @property
    def local(self) -> tuple[int, ...]: ...
    @property
    def ranks(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def last_step(self) -> StepRecord | None: ...

    def step(
        self,
        program: Program,
        stages: Mapping[int, CompiledStage],
        given: StepInput,
        parameters: Mapping[str, nn.Parameter],
    ) -> torch.Tensor: ...


def _begin(
    program: Program, stages: Mapping[int, CompiledStage], given: StepInput, gradients: Gradients
) -> dict[int, StageRun]:
    factor = _loss_factor(program, given, next(iter(stages.values())).device)
    count = program.schedule.microbatches
    seeds = [microbatch_seed(given.index, i, given.seed) for i in range(count)]
    return {i: StageRun(stage, gradients, given.microbatches, factor, seeds) for i, stage in stages.items()}


def _loss_factor(program: Program, given: StepInput, device: torch.device) -> torch.Tensor:
    """The gradient of the step's loss by one microbatch's: 1/m enters the backward here, as in eager's (loss / m)."""
    one = torch.ones((), dtype=getattr(torch, program.loss_dtype), device=device)
    return one / program.schedule.microbatches if given.reduction == "mean" else one


def _rank_run(
    program: Program,
    rank: int,
    runs: Mapping[int, StageRun],
    transport: Transport,
    position: Position,
    observe: Recorder | None,
) -> RankRun:
    own = {stage: runs[stage] for stage in program.stages_of(rank)}
    order = program.lowered.programs[rank]
    return RankRun(rank, order, own, program.rank_of, program.schedule.stages - 1, transport, position, observe)


def _end(runs: Mapping[int, StageRun]) -> None:
    for run in runs.values():
        run.check_empty()


@dataclass
class InProcess:
    """All rank programs in this process, in a deterministic interleaving: each rank runs until its input is missing."""

    ranks: int
    device: torch.device
    watch: Alone = field(default_factory=lambda: Alone(Position()))
    last_step: StepRecord | None = None

    @property
    def local(self) -> tuple[int, ...]:
        return tuple(range(self.ranks))

    def step(
        self,
        program: Program,
        stages: Mapping[int, CompiledStage],
        given: StepInput,
        parameters: Mapping[str, nn.Parameter],
    ) -> torch.Tensor:
        gradients = Gradients(parameters, program.shared)
        runs = _begin(program, stages, given, gradients)
        mailboxes, observe = Mailboxes(), Recorder() if given.record else None
        position = self.watch.position
        with undisturbed(self.device):
            interleave([_rank_run(program, rank, runs, mailboxes, position, observe) for rank in self.local])
        mailboxes.finish()
        _end(runs)
        sum_shared_in_process(program, gradients)
        self.last_step = observe.finish(in_process=True) if observe else None
        return total_loss(runs[program.schedule.stages - 1].losses, program.schedule.microbatches, given.reduction)


def interleave(ranks: Sequence[RankRun]) -> None:
    """Run the ranks in turn, each until it must wait, until all are done."""
    running = {rank.rank: rank.run() for rank in ranks}
    before: dict[int, Action] = {}
    while running:
        turns = {rank: _turn(ranks[rank], program) for rank, program in running.items()}
        waiting = {rank: action for rank, action in turns.items() if action is not None}
        if waiting and waiting == before:
            stuck = ", ".join(f"rank {rank} at {action}" for rank, action in waiting.items())
            raise PipelineError(f"no rank can go on: {stuck}; the schedule's order is not executable")
        before, running = waiting, {rank: running[rank] for rank in waiting}


def _turn(rank: RankRun, program: Iterator[Action]) -> Action | None:
    rank.position.rank = rank.rank
    return next(program, None)


@dataclass
class Distributed:
    """This process is one rank of a process group."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    device: torch.device
    up: dist.ProcessGroup
    down: dist.ProcessGroup
    watch: Watch
    last_step: StepRecord | None = None

    @property
    def local(self) -> tuple[int, ...]:
        return (self.rank,)

    def step(
        self,
        program: Program,
        stages: Mapping[int, CompiledStage],
        given: StepInput,
        parameters: Mapping[str, nn.Parameter],
    ) -> torch.Tensor:
        gradients = Gradients(parameters, program.shared)
        runs = _begin(program, stages, given, gradients)
        transport = self._transport(program)
        position = self.watch.position
        if given.record:
            with position.waiting("the common start"):
                dist.barrier(self.group)
        observe = Recorder() if given.record else None
        with undisturbed(self.device):
            for action in _rank_run(program, self.rank, runs, transport, position, observe).run():
                raise PipelineError(f"rank {self.rank} cannot run {action}: its input was never requested")
        with position.waiting("the last sends"):
            transport.finish()
        _end(runs)
        with position.waiting("the sum of tied gradients"):
            sum_shared(program, gradients, self.rank, self.group)
        with position.waiting("the end"):
            self.last_step = self._gather(observe) if observe else None
            return self._loss(program, runs, given)

    def _transport(self, program: Program) -> PointToPoint:
        channels = Channels(self.up, self.down, self.rank, program.schedule.microbatches)
        return PointToPoint(channels, self.device)

    def _loss(self, program: Program, runs: Mapping[int, StageRun], given: StepInput) -> torch.Tensor:
        last = program.schedule.stages - 1
        count = program.schedule.microbatches
        own = total_loss(runs[last].losses, count, given.reduction) if last in runs else None
        like = torch.empty((), dtype=getattr(torch, program.loss_dtype), device=self.device)
        return share_loss(own, like, self.group)

    def _gather(self, observe: Recorder) -> StepRecord:
        """Every rank learns every rank's record."""
        own = observe.finish(in_process=False)
        records: list[StepRecord] = [own] * self.ranks
        dist.all_gather_object(records, own, group=self.group)
        spans = {rank: found for record in records for rank, found in record.spans.items()}
        peaks = {rank: found for record in records for rank, found in record.peak_activation_bytes.items()}
        return StepRecord(spans, peaks, own.step_time, in_process=False)
