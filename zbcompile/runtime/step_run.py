"""One step on the ranks of this process: what their runs share, and the actions that it has once, one method for each
kind: those of the optimizer for every stage, and the exchanges, which all ranks do together before or behind all other
actions.

An exchange happens once all ranks have come to it; it is done once for all ranks of this process, which need no message
among each other.

Eager autograd adds the uses of a parameter per microbatch, the last use first, and then accumulates the sums in
microbatch order. So TIE adds the stages' gradients from the last stage to the first, before they are folded. Of two
model copies (DualPipe) the first has the lower microbatches: its sums are folded first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from zbcompile.distributed.mesh import BATCHES, broadcast
from zbcompile.distributed.packing import empty
from zbcompile.distributed.ranks import Ranks
from zbcompile.distributed.transport import Transport
from zbcompile.distributed.under_way import complete, outlives_its_step
from zbcompile.faults.watchdog import Alone, Watch
from zbcompile.model.losses import Losses
from zbcompile.model.seeds import microbatch_seed
from zbcompile.passes.torch_names import dtype_named
from zbcompile.program.program import Program
from zbcompile.runtime.action_loop import Observer, RankRun
from zbcompile.runtime.data_parallel import Reduction
from zbcompile.runtime.engine import Executable, Made, StepInput
from zbcompile.runtime.equal_results import EqualResults, written_buffers
from zbcompile.runtime.gradient_sums import WHOLE, Gradients, add_uses
from zbcompile.runtime.labels import Labels
from zbcompile.runtime.rank_plan import RankPlan
from zbcompile.runtime.slices import LATE
from zbcompile.runtime.stage_plan import LOOKUPS, SHARD, CompiledStage
from zbcompile.runtime.stage_run import StageRun
from zbcompile.runtime.vocabulary_collectives import ShardStep
from zbcompile.runtime.vocabulary_parameters import VocabularyExecutable
from zbcompile.schedules.ir.actions import EXCHANGES, Action
from zbcompile.schedules.ir.kinds import KINDS
from zbcompile.torch_private import profiler_is_on


@dataclass
class StepRun:
    """`runs` are those of this process's ranks, `reductions` the sums of their gradients. `losses` are there after
    LOSS; `made`, the leaves of the model's output by microbatch, after OUTPUT, on ranks that were to have them.

    Microbatches are numbered over all replicas: together they train as one pipeline on the concatenated batch.
    """

    executable: Executable
    given: StepInput
    ranks: Ranks
    equal: EqualResults
    reductions: Sequence[Reduction]
    runs: list[RankRun] = field(default_factory=list)
    losses: Losses = field(default_factory=lambda: Losses(()))
    made: Made = field(default_factory=dict)
    come: dict[str, int] = field(default_factory=dict)  # how many of the runs, to each exchange

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of actions that the step has once per stage or rank."""
        return frozenset(op for op, once in ONCE_ACTIONS.items() if once.is_needed(self))

    @property
    def program(self) -> Program:
        return self.executable.program

    @property
    def trains(self) -> bool:
        return self.program.output is None

    @property
    def looks_up_rows(self) -> bool:
        """Whether a stage looks up an embedding whose rows other processes train."""
        return self.ranks.group is not None and self.trains and bool(self.program.tied)

    def begin(self, plans: Sequence[RankPlan], transport: Transport, observer: Observer | None) -> None:
        """Make the runs of the ranks that have these plans."""
        observe = Labels(observer) if profiler_is_on() else observer
        vocabulary = self.executable.first.vocabulary
        collectives = None if vocabulary is None else vocabulary.collectives(transport)
        for plan, reduction in zip(plans, self.reductions, strict=True):
            runs = self._stages(plan.rank, reduction.gradients)
            if vocabulary is not None and collectives is not None:
                runs |= self._shards(vocabulary, plan.rank, reduction.gradients)
                number = self.program.stages_of(plan.rank)[0]
                collectives.shards[plan.rank] = ShardStep(number, runs[SHARD], runs.get(LOOKUPS))
            self.runs.append(RankRun(plan, runs, transport, self.ranks.watch.position, observe, collectives, once=self))

    def _stages(self, rank: int, gradients: Gradients) -> dict[int, StageRun]:
        graphs = self.executable.graphs
        return {
            stage: self._run_of([each.stages[stage] for each in graphs], gradients)
            for stage in self.program.stages_of(rank)
        }

    def _shards(self, vocabulary: VocabularyExecutable, rank: int, gradients: Gradients) -> dict[int, StageRun]:
        shards, count = vocabulary.shards[rank], len(self.executable.graphs)
        rows = vocabulary.rows.within_sums(rank)
        return {number: self._run_of([shard] * count, gradients, rows) for number, shard in shards.items()}

    def _run_of(self, stages: Sequence[CompiledStage], gradients: Gradients, rows: slice | None = None) -> StageRun:
        return StageRun(stages, gradients, self.given.microbatches, self._loss_factor, self._seeds, rows)

    @cached_property
    def _seeds(self) -> list[int]:
        count = self.program.schedule.microbatches
        first = self.ranks.mesh.index(*BATCHES) * count
        return [microbatch_seed(self.given.index, i, self.given.seed) for i in range(first, first + count)]

    @cached_property
    def _loss_factor(self) -> torch.Tensor:
        """The gradient of the step's loss by a microbatch's: 1/m enters the backward here, as in eager's (loss / m)."""
        program, given = self.program, self.given
        one = torch.ones((), dtype=dtype_named(program.loss_dtype), device=self.executable.first.buffers.device)
        count = program.schedule.microbatches * self.ranks.replicas.count
        scaled = given.scale(one).to(one.dtype) if given.scale else one  # a GradScaler answers in float32
        return scaled / count if given.reduction == "mean" else scaled

    def arrive(self, op: str) -> None:
        """A rank comes to an exchange."""
        self.come[op] = self.come.get(op, 0) + 1

    def ready(self, op: str) -> bool:
        """Whether all ranks of this process have come; processes wait for each other inside of it."""
        return self.come[op] >= len(self.runs)

    def carry_out(self, action: Action, rank: int) -> None:
        """Do it: an exchange if no other rank of this process has. If replicas take different steps, nothing is
        exchanged between them, and all ranks raise once their passes have run."""
        op, agreement = action.op, self.given.agreement
        if op in OVER_REPLICAS and agreement is not None and agreement.differs():
            if op == "LOSS":
                agreement.require()
        elif op not in EXCHANGES:
            ONCE_ACTIONS[op].run(self, self._reduction(rank), action.stage)
        elif self.come[op] == len(self.runs):
            self.come[op] += 1
            with self.ranks.watch.position.waiting(KINDS[op].meaning):
                ONCE_ACTIONS[op].run(self)

    def _reduction(self, rank: int) -> Reduction:
        return self.reductions[self.ranks.local.index(rank)]

    # For a stage

    def _act(self, op: str, stage: int) -> None:
        for act in self.given.actions[op]:
            act(stage)

    def _update_stage(self, reduction: Reduction, stage: int) -> None:
        reduction.finish_stage(stage)
        reduction.gradients.settle(self.program.complete_with(stage))
        self._act("OPT", stage)

    # For all ranks together

    def _gather_rows(self) -> None:
        vocabulary = self.executable.first.vocabulary
        assert vocabulary is not None
        assert vocabulary.group is not None
        vocabulary.rows.gather_lookups(self._gradients(), self.program.tied, vocabulary.group)

    def _drain(self) -> None:
        for run in self.runs:
            if run.collectives is not None:
                run.collectives.finish(run.rank)
            run.transport.finish()

    def _sum_tied(self) -> None:
        """The running sum walks from the rank of the last use to that of the first, which gives all holders the
        total."""
        for name in sorted(self.program.shared):
            holders = sorted(self.program.holders(name))
            totals = [self._share(name, walk, self._walk(name, walk), holders) for walk in walks(self.program, name)]
            first = next((rank for rank in self.ranks.local if rank in holders), None)
            for total in totals if first is not None else ():
                self._gradients(first)[name].fold(total)
        vocabulary = self.executable.first.vocabulary
        if vocabulary is not None and vocabulary.group is not None and self.looks_up_rows:
            vocabulary.rows.share_lookups(self._gradients(), self.program.tied, vocabulary.group)

    def _gradients(self, rank: int | None = None) -> Gradients:
        return self._reduction(self.ranks.local[0] if rank is None else rank).gradients

    def _walk(self, name: str, walk: "Walk") -> list[torch.Tensor]:
        """The total, on the rank of the first use; other processes end with an empty list."""
        running: list[torch.Tensor] = []
        before, local = walk.ranks[0], self.ranks.local
        for stage, here in zip(walk.stages, walk.ranks, strict=True):
            if before in local and here not in local:
                self._send(running, here)
                running = []
            if here in local:
                running = running if before in local else self._receive(name, before, walk)
                running = add_uses(running, self._gradients(here)[name].take(stage, walk.microbatches))
            before = here
        return running

    def _share(self, name: str, walk: "Walk", total: list[torch.Tensor], holders: Sequence[int]) -> list[torch.Tensor]:
        """The total, in the processes of all holders."""
        owner, local = walk.ranks[-1], self.ranks.local
        if owner not in local:
            return self._receive(name, owner, walk) if set(local) & set(holders) else []
        for holder in holders:
            if holder not in local:
                self._send(total, holder)
        return total

    def _send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        for tensor in tensors:
            dist.send(tensor.contiguous(), group=self.ranks.group, group_dst=to)

    def _receive(self, name: str, source: int, walk: "Walk") -> list[torch.Tensor]:
        own = self._gradients()[name]
        like, dtype = own.parameter, own.dtype_of_parts
        buffers = [torch.empty(like.shape, dtype=dtype, device=like.device) for _ in walk.microbatches]
        for buffer in buffers:
            dist.recv(buffer, group=self.ranks.group, group_src=source)
        return buffers

    def _end_sums(self) -> None:
        for reduction in self.reductions:
            reduction.finish()
            reduction.gradients.settle()

    def _share_buffers(self) -> None:
        """Replicas continue with the first one's, as under DistributedDataParallel."""
        for name, buffer in written_buffers(self.executable).items():
            if name in self.executable.first.sums:
                broadcast([buffer], self.executable.first.sums[name].group)

    def _share_losses(self) -> None:
        """Whoever waits for all losses does not end its step before all have run their passes, and so does not update
        its parameters although another rank has failed."""
        equal, found = self.equal, dict[str, torch.Tensor | None]()
        for reduction in self.reductions if equal.pending else ():
            found |= reduction.results()
        own = {i: loss for run in self.runs for i, loss in run.losses().items()}
        if self.ranks.group is None:
            self.losses = Losses([own[i].detach() for i in range(self.program.schedule.microbatches)])
            return
        shared, news, work = share_losses(self.program, own, self.ranks, equal.has_news(self.executable, found))
        self.losses = Losses(shared[:, 0].unbind(), partial(_wait, self.ranks.watch, work))
        if equal.pending or not self.given.ahead:
            self.losses.read()
        if equal.pending and news:
            equal.compare(self.executable, found, shared)

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
                    own[i] = own[i].contiguous() if ranks.rank == source else empty(spec, ranks.device)
                    ranks.broadcast(own[i], source)


def _has(op: str) -> Callable[[StepRun], object]:
    return lambda step: step.given.actions.get(op)


class OnceAction(NamedTuple):
    """Whether a step has actions of this kind, and what they do: for a stage, or for all ranks of this process."""

    is_needed: Callable[[StepRun], object]
    run: Callable[..., None]


OVER_REPLICAS = {"REDUCE", "OPT", "SYNC", "BUFFERS", "FINAL", "LOSS"}
ONCE_ACTIONS = {
    "VALIDATE": OnceAction(_has("VALIDATE"), lambda step, reduction, at: step._act("VALIDATE", at)),
    "GATHER": OnceAction(_has("GATHER"), lambda step, reduction, at: step._act("GATHER", at)),
    "REDUCE": OnceAction(lambda step: step.reductions[0].reduces, lambda step, reduction, at: reduction.start(at)),
    "OPT": OnceAction(_has("OPT"), StepRun._update_stage),
    "ROWS": OnceAction(lambda step: step.looks_up_rows, StepRun._gather_rows),
    "DRAIN": OnceAction(lambda step: True, StepRun._drain),
    "TIE": OnceAction(lambda step: step.trains and (step.program.shared or step.looks_up_rows), StepRun._sum_tied),
    "SYNC": OnceAction(lambda step: step.trains, StepRun._end_sums),
    "BUFFERS": OnceAction(lambda step: step.trains and step.executable.first.sums, StepRun._share_buffers),
    "FINAL": OnceAction(_has("OPT"), lambda step: step._act("OPT", LATE)),
    "LOSS": OnceAction(lambda step: step.trains, StepRun._share_losses),
    "OUTPUT": OnceAction(lambda step: step.given.outputs, StepRun._collect_outputs),
}


def _wait(watch: Alone | Watch, work: dist.Work) -> None:
    with watch.apart("the losses of all ranks"):
        complete(work)


@dataclass(frozen=True)
class Walk:
    """How the gradients of a shared parameter are summed for one model copy: `stages` that train it, the last first,
    on `ranks`, for `microbatches`: a gradient is one tensor per microbatch in exact mode, else one of the WHOLE."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    microbatches: Sequence[int]


def walks(program: Program, name: str) -> list[Walk]:
    """One walk per model copy, in the order in which their sums accumulate."""
    stages = tuple(stage.stage for stage in reversed(program.stages) if name in stage.trained)
    per_copy = program.schedule.microbatches // program.copies
    copies = [range(first, first + per_copy) for first in range(0, program.schedule.microbatches, per_copy)]
    return [
        Walk(stages, tuple(program.rank_of(s, each[0]) for s in stages), each if program.exact else (WHOLE,))
        for each in copies
    ]


def share_losses(
    program: Program, own: Mapping[int, torch.Tensor], ranks: Ranks, news: bool = False
) -> tuple[torch.Tensor, torch.Tensor, dist.Work]:
    """Begin to give every rank the loss of every microbatch of all replicas, as every rank along "tp" computed it: a
    tensor [replicas x microbatches, tp]. Beside it, how many ranks have `news`, on the device.

    Each has one owner and the other ranks add zeros, which changes no bit.
    """
    count, mesh = program.schedule.microbatches, ranks.mesh
    shape = (ranks.replicas.count * count + 1, mesh.size("tp"))
    shared = torch.zeros(shape, dtype=dtype_named(program.loss_dtype), device=ranks.device)
    for microbatch, loss in own.items():
        shared[ranks.replicas.rank * count + microbatch, mesh.index("tp")].copy_(loss)
    shared[-1] += news
    work = dist.all_reduce(shared, group=ranks.everyone, async_op=True)
    return shared[:-1], shared[-1, 0], outlives_its_step(work)
