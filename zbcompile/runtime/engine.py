"""The two ways to run a step: all ranks inside this process, or this process as one rank of a group."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.channels import Channels, Ordered, Tagged, open_channels
from zbcompile.distributed.clocks import clock_of, offset_to_first
from zbcompile.distributed.faults import Position
from zbcompile.distributed.transport import Mailboxes, PointToPoint, ReceiveBuffers, Transport
from zbcompile.distributed.watchdog import Alone, Watch
from zbcompile.errors import PipelineError
from zbcompile.model.seeds import microbatch_seed, undisturbed
from zbcompile.passes.graph.roles import Slot
from zbcompile.program.program import Program
from zbcompile.runtime.action_loop import RankRun
from zbcompile.runtime.data_parallel import Replicas
from zbcompile.runtime.gradients import Gradients
from zbcompile.runtime.rank_plan import RankPlan, plan_rank
from zbcompile.runtime.recorder import Labels, Recorder, Seen, StepRecord, make_record
from zbcompile.runtime.shared_gradients import share_losses, sum_shared, sum_shared_in_process
from zbcompile.runtime.stage_plan import CompiledStage
from zbcompile.runtime.stage_run import StageRun
from zbcompile.runtime.vocabulary_collectives import Collectives
from zbcompile.runtime.vocabulary_parameters import VocabularyExecutable
from zbcompile.schedules.checking.communication_rules import channels_of
from zbcompile.schedules.ir.actions import Action
from zbcompile.schedules.ir.schedule import Schedule
from zbcompile.torch_private import group_called, is_bound, profiler_is_on


@dataclass(frozen=True)
class StepInput:
    """One step: the tensors of each microbatch by input path, which step it is, how losses combine, and how a
    GradScaler scales the loss."""

    microbatches: list[dict[str, torch.Tensor]]
    index: int
    seed: int
    reduction: str
    record: bool
    scale: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Executable:
    """A program with what this process runs of it: its compiled stages, the plans of its ranks, and their buffers."""

    program: Program
    stages: Mapping[int, CompiledStage]
    plans: tuple[RankPlan, ...]
    buffers: ReceiveBuffers
    vocabulary: VocabularyExecutable | None


def make_executable(
    program: Program,
    stages: Mapping[int, CompiledStage],
    ranks: Sequence[int],
    device: torch.device,
    vocabulary: VocabularyExecutable | None = None,
) -> Executable:
    """Plan the steps of `ranks`, whose stages are in `stages` and whose vocabulary shards in `vocabulary`."""
    plans = tuple(plan_rank(program, rank, stages) for rank in ranks)
    return Executable(program, stages, plans, ReceiveBuffers(device), vocabulary)


class Engine(Protocol):
    """Runs compiled steps. `local` are the ranks whose stages live in this process, `watch` guards what ranks do
    together."""

    @property
    def watch(self) -> Alone | Watch: ...
    @property
    def replicas(self) -> Replicas: ...
    @property
    def local(self) -> tuple[int, ...]: ...
    @property
    def ranks(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def last_step(self) -> StepRecord | None: ...

    def disconnect(self) -> None:
        """Let go of what the ranks have for themselves."""
        ...

    def step(
        self, executable: Executable, given: StepInput, parameters: Mapping[str, nn.Parameter]
    ) -> list[torch.Tensor]:
        """Run one step; gradients accumulate into the parameters. Returns the loss of each microbatch of all
        replicas."""
        ...


def is_first(engine: Engine) -> bool:
    """Whether this process has the first rank of all: the one that speaks and writes for all."""
    return 0 in engine.local and engine.replicas.rank == 0


def _begin(
    executable: Executable,
    plan: RankPlan,
    given: StepInput,
    gradients: Gradients,
    transport: Transport,
    position: Position,
    recorder: Recorder | None,
    replicas: Replicas,
    collectives: Collectives | None,
) -> RankRun:
    """Microbatches are numbered over all replicas: together they train as one pipeline on the concatenated batch."""
    program = executable.program
    count = program.schedule.microbatches
    factor = _loss_factor(program, given, count * replicas.count, executable.buffers.device)
    first = replicas.rank * count
    seeds = [microbatch_seed(given.index, i, given.seed) for i in range(first, first + count)]
    runs = {
        stage: StageRun(executable.stages[stage], gradients, given.microbatches, factor, seeds)
        for stage in program.stages_of(plan.rank)
    }
    observe = Labels(recorder) if profiler_is_on() else recorder
    if executable.vocabulary is None or collectives is None:
        return RankRun(plan, runs, transport, position, observe)
    shard = executable.vocabulary.begin(plan.rank, gradients, given.microbatches, factor, transport, collectives)
    return RankRun(plan, runs, shard, position, observe, shard)


def _collectives(executable: Executable) -> Collectives | None:
    return executable.vocabulary.collectives() if executable.vocabulary else None


def _loss_factor(program: Program, given: StepInput, count: int, device: torch.device) -> torch.Tensor:
    """The gradient of the step's loss by one microbatch's: 1/m enters the backward here, as in eager's (loss / m)."""
    one = torch.ones((), dtype=getattr(torch, program.loss_dtype), device=device)
    factor = one / count if given.reduction == "mean" else one
    return given.scale(factor) if given.scale else factor


def _end(run: RankRun) -> dict[int, torch.Tensor]:
    """Check that nothing is left; the losses of the microbatches whose last stage ran here."""
    for stage in run.runs.values():
        stage.check_empty()
    if run.vocabulary is not None:
        run.vocabulary.shard.check_empty()
        if run.vocabulary.is_root:
            return run.vocabulary.shard.losses
    return {i: loss for stage in run.runs.values() for i, loss in stage.losses.items()}


def _changed_buffers(stages: Mapping[int, CompiledStage]) -> Iterator[torch.Tensor]:
    """What forwards write: replicas go on with the first one's, as under DistributedDataParallel."""
    for stage in stages.values():
        for slot in stage.program.pieces["F"].outputs:
            if slot.kind == "mutation":
                yield stage.resident[Slot("buffer", slot.name)]


@dataclass
class InProcess:
    """All rank programs in this process, in a deterministic interleaving: each rank runs until its input is missing."""

    ranks: int
    device: torch.device
    watch: Alone = field(default_factory=lambda: Alone(Position()))
    replicas: Replicas = field(default_factory=Replicas)
    last_step: StepRecord | None = None

    @property
    def local(self) -> tuple[int, ...]:
        return tuple(range(self.ranks))

    def disconnect(self) -> None:
        pass

    def step(
        self, executable: Executable, given: StepInput, parameters: Mapping[str, nn.Parameter]
    ) -> list[torch.Tensor]:
        program, mailboxes = executable.program, Mailboxes()
        recorder = Recorder(program, clock_of(self.device)) if given.record else None
        gradients = [Gradients(parameters, program.shared, program.choices) for _ in self.local]
        collectives = _collectives(executable)
        runs = [
            _begin(executable, plan, given, own, mailboxes, self.watch.position, recorder, self.replicas, collectives)
            for plan, own in zip(executable.plans, gradients, strict=True)
        ]
        with undisturbed(self.device), torch.no_grad():
            interleave(runs)
        for run in runs:
            run.transport.finish()
        losses = {i: loss for run in runs for i, loss in _end(run).items()}
        sum_shared_in_process(program, gradients)
        for own in gradients:
            own.finish()
        self.last_step = make_record(program, [recorder.seen()], in_process=True) if recorder else None
        return [losses[i].detach() for i in range(program.schedule.microbatches)]


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
    """This process is one rank of a process group: `group` holds the ranks of its pipeline, `everyone` those of all
    replicas."""

    group: dist.ProcessGroup
    everyone: dist.ProcessGroup
    rank: int
    ranks: int
    device: torch.device
    backend: str
    watch: Watch
    replicas: Replicas
    ordered: bool  # messages are told apart by their order alone, as NCCL does
    last_step: StepRecord | None = None
    ahead: float | None = None  # seconds that this host's clock is ahead of the first rank's
    collectives: dist.ProcessGroup | None = None
    opened: Ordered | None = None

    @property
    def local(self) -> tuple[int, ...]:
        return (self.rank,)

    def channels(self, schedule: Schedule, microbatches: int) -> Channels:
        """What carries messages between the ranks of a schedule, by the numbers of `microbatches`; all ranks call it,
        and the first call opens what the ranks have for themselves."""
        if not self.ordered:
            return Tagged(self.group, microbatches)
        if self.opened is None:
            store, pairs = self.watch.board.private_store(self.group), channels_of(schedule)
            with self.watch.position.waiting("the opening of the channels"):
                self.opened = open_channels(self.backend, pairs, self.rank, store, self.device, self.watch.timeout)
            self.watch.groups = (*self.watch.groups, *self.opened.links)
        return self.opened

    def disconnect(self) -> None:
        """Close the channels; all ranks call it, as NCCL ends a communicator from both its ends."""
        if self.opened is not None and self.watch.fault is None:
            self.opened.close(self.backend)
        self.opened = None

    def collective_group(self) -> dist.ProcessGroup:
        """The process group of the vocabulary's collectives, made by all ranks at the first call."""
        if self.collectives is None:
            if self.replicas.count > 1 and is_bound(dist.group.WORLD):
                raise PipelineError(
                    "vocab= beside replicas needs a process group that is not bound to a device, since only all ranks "
                    "together can make new groups of one that is. Call init_process_group without device_id=."
                )
            members = dist.get_process_group_ranks(self.group)
            self.collectives = dist.new_group(members, use_local_synchronization=True)
            self.watch.groups = (*self.watch.groups, self.collectives)
        return self.collectives

    def watch_over(self, names: Iterable[str]) -> None:
        """Process groups that the graphs communicate through: they end with this pipeline when one of its ranks
        fails, so that their other ranks do not wait for it."""
        self.watch.inner = tuple({*self.watch.inner, *map(group_called, names)})

    def step(
        self, executable: Executable, given: StepInput, parameters: Mapping[str, nn.Parameter]
    ) -> list[torch.Tensor]:
        program, transport = executable.program, self._transport(executable)
        gradients, position = Gradients(parameters, program.shared, program.choices), self.watch.position
        if given.record:
            with position.waiting("the common start"):
                self._compare_clocks()
                dist.barrier(self.group)
        recorder = Recorder(program, clock_of(self.device)) if given.record else None
        if executable.vocabulary is not None:
            with position.waiting("the rows of a tied embedding"):
                executable.vocabulary.begin_step(gradients, program.tied)
        run = _begin(
            *(executable, executable.plans[0], given, gradients, transport, position, recorder, self.replicas),
            _collectives(executable),
        )
        reduction = self.replicas.begin(program, self.rank, gradients)
        run.after = reduction.hooks
        with undisturbed(self.device), torch.no_grad():
            for action in run.run():
                raise PipelineError(f"rank {self.rank} cannot run {action}: its input was never requested")
        with position.waiting("the last sends"):
            run.transport.finish()
        losses = _end(run)
        with position.waiting("the sum of tied gradients"):
            sum_shared(program, gradients, self.rank, self.group)
        if executable.vocabulary is not None:
            with position.waiting("the gradients of a tied embedding"):
                executable.vocabulary.end_step(gradients, program.tied)
        with position.waiting("the sum over replicas"):
            reduction.finish()
            gradients.finish()
            self.replicas.broadcast(_changed_buffers(executable.stages))
        with position.waiting("the end"):
            self.last_step = self._gather(recorder) if recorder else None
            losses = {self.replicas.rank * program.schedule.microbatches + i: loss for i, loss in losses.items()}
            return share_losses(program, losses, self.replicas.count, self.device, self.everyone)

    def _transport(self, executable: Executable) -> PointToPoint:
        schedule = executable.program.schedule
        return PointToPoint(self.channels(schedule, schedule.microbatches), executable.buffers)

    def _compare_clocks(self) -> None:
        if self.ahead is None:
            self.ahead = offset_to_first(self.everyone, self.device)

    def _gather(self, recorder: Recorder) -> StepRecord:
        """Every rank learns what every rank of its pipeline has seen."""
        own = recorder.seen().shifted(self.ahead or 0.0)
        parts: list[Seen] = [own] * self.ranks
        dist.all_gather_object(parts, own, group=self.group)
        return make_record(recorder.program, parts, in_process=False)
