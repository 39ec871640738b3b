"""The collectives of the vocabulary passes: messages among all shards, between passes of theirs.

CAST carries the last stage's output to all shards, STATS gathers what S made and, with one barrier,
sums the parts of the input gradient on the rank of the last stage; with two barriers SUM does that
after T. LOOKUP sums the looked up rows of a sharded embedding on the rank of the first stage,
SPREAD carries their gradient to all shards. Every rank posts all of them in one order
(`zbcompile.schedules.lowering.collectives`) and posting never waits. What a collective takes and
brings are messages in the boxes of the transport.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import NamedTuple

import torch
import torch.distributed as dist

from zbcompile.distributed.packing import empty
from zbcompile.distributed.transport import Transport
from zbcompile.engine.stage import StageRun
from zbcompile.passes import gpu
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.torch_names import dtype_named
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram
from zbcompile.schedules.ir.actions import CAST, LOOKUP, SPREAD, STATS, SUM, B, F, S, T
from zbcompile.schedules.lowering.edges import (
    GRADIENT_MESSAGE,
    HIDDEN_MESSAGE,
    ROWS_MESSAGE,
    Message,
)

Job = Callable[[], None]
Held = Callable[[], list[torch.Tensor]]


class EndRanks(NamedTuple):
    """The ranks of the first and of the last stage, and the number of the latter."""

    first: int
    last: int
    last_stage: int


@dataclass
class InProcess:
    """All shards are in one process: a collective happens when the last of them has posted it. Sums
    are in rank order."""

    count: int
    posted: Counter[tuple[str, int]] = field(default_factory=Counter)

    def start(self, op: str, microbatch: int, job: Job, held: Held) -> Job:
        self.posted[op, microbatch] += 1
        if self.posted[op, microbatch] == self.count:
            job()
        return lambda: None

    def broadcast(
        self, value: torch.Tensor | None, like: TensorSpec, root: int
    ) -> dict[int, torch.Tensor]:
        assert value is not None
        return dict.fromkeys(range(self.count), value)

    def gather(self, own: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return torch.stack([own[rank] for rank in sorted(own)])

    def total(self, own: Mapping[int, torch.Tensor], root: int) -> torch.Tensor | None:
        return reduce(torch.add, [own[rank] for rank in sorted(own)])

    def finish(self) -> None:
        pass


@dataclass
class OverGroup:
    """This process is one rank of `group`. Collectives run in the order of their posts alongside
    the passes: on a separate thread if the host carries them out (gloo), on `stream` on CUDA."""

    group: dist.ProcessGroup
    device: torch.device
    stream: gpu.Stream | None
    started: "list[Future[None]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = (
            ThreadPoolExecutor(1, "zbcompile-collectives") if self.stream is None else None
        )

    def start(self, op: str, microbatch: int, job: Job, held: Held) -> Job:
        if self._thread is None:
            return self._on_stream(job, held)
        self.started.append(self._thread.submit(torch.no_grad()(job)))
        return self.started[-1].result

    def _on_stream(self, job: Job, held: Held) -> Job:
        """Run after everything that the compute stream has been given so far; a wait makes the
        compute stream wait. The allocator is told which of what is `held` the other stream uses, so
        that it is not reused too early.
        """
        assert self.stream is not None
        for value in held():
            value.record_stream(self.stream)
        self.stream.wait_stream(gpu.current_stream(self.device))
        with gpu.on_stream(self.stream):
            job()
        event = gpu.Event()
        event.record(self.stream)

        def wait() -> None:
            stream = gpu.current_stream(self.device)
            stream.wait_event(event)
            for value in held():
                value.record_stream(stream)

        return wait

    def broadcast(
        self, value: torch.Tensor | None, like: TensorSpec, root: int
    ) -> dict[int, torch.Tensor]:
        value = empty(like, self.device) if value is None else value
        dist.broadcast(value, group=self.group, group_src=root)
        return {dist.get_rank(self.group): value}

    def gather(self, own: Mapping[int, torch.Tensor]) -> torch.Tensor:
        (value,) = own.values()
        gathered = value.new_empty(dist.get_world_size(self.group), *value.shape)
        dist.all_gather(list(gathered.unbind(0)), value, group=self.group)
        return gathered

    def total(self, own: Mapping[int, torch.Tensor], root: int) -> torch.Tensor | None:
        ((rank, part),) = own.items()
        part = part.contiguous()
        dist.reduce(part, group=self.group, group_dst=root)
        return part if rank == root else None

    def finish(self) -> None:
        """Every collective has ended (on CUDA, for what the compute stream is given next); raises
        what failed."""
        for each in self.started:
            each.result()
        if self.stream is not None:
            gpu.current_stream(self.device).wait_stream(self.stream)
        if self._thread is not None:
            self._thread.shutdown()


@dataclass
class ShardStep:
    """A rank's shard during one step: its passes, and those of its rows of the embedding. `stage`
    names it.

    Gradients of looked up rows arrive with SPREAD and wait in `spread` until a collective that was
    posted after it is awaited: then they have certainly arrived, and are always added at the same
    place of the step. `posted` are the microbatches in the order of their SPREAD, of which `added`
    have been added.
    """

    stage: int
    output: StageRun
    lookups: StageRun | None
    spread: dict[int, torch.Tensor] = field(default_factory=dict)
    posted: list[int] = field(default_factory=list)
    added: int = 0

    def add_rows(self, count: int) -> None:
        """Add the gradients of the first `count` posted microbatches that have not been
        added yet."""
        for microbatch in self.posted[self.added : count]:
            assert self.lookups is not None
            self.lookups.run(SPREAD, microbatch, [self.spread.pop(microbatch)])
        self.added = max(self.added, count)

    def held(self, microbatch: int) -> Iterator[torch.Tensor]:
        """What waits here of a microbatch, and all gradients of rows."""
        frame = self.output.frames.get(microbatch, [])
        yield from (value for value in frame if value is not None)
        yield from self.spread.values()


@dataclass(frozen=True)
class CollectiveWait:
    """Waits for a collective, and adds the gradients of rows that SPREAD has brought before it."""

    complete: Job
    shard: ShardStep
    before: int

    def wait(self) -> None:
        self.complete()
        self.shard.add_rows(self.before)


@dataclass
class Collectives:
    """The collectives of one step, among the `shards` of this process by rank."""

    program: VocabularyProgram
    ends: EndRanks
    carrier: InProcess | OverGroup
    transport: Transport
    shards: dict[int, ShardStep] = field(default_factory=dict)

    def post(self, op: str, rank: int, microbatch: int) -> None:
        """Let a rank take part in a collective."""
        shard = self.shards[rank]
        if op == SPREAD:
            shard.posted.append(microbatch)
        complete = self.carrier.start(
            op,
            microbatch,
            partial(_JOBS[op], self, microbatch),
            partial(self._held, shard, microbatch),
        )
        arrived = CollectiveWait(complete, shard, len(shard.posted))
        for message in self._brought(op, rank, microbatch):
            self.transport.receives[message] = [arrived]

    def finish(self, rank: int) -> None:
        """All collectives have ended, and all gradients of rows are added."""
        self.carrier.finish()
        self.shards[rank].add_rows(len(self.shards[rank].posted))

    @property
    def _trains(self) -> bool:
        return self.program.barriers > 0

    def _brought(self, op: str, rank: int, microbatch: int) -> Iterator[Message]:
        """The messages with which a rank waits for a collective."""
        if op == CAST or (op == STATS and self._trains):
            yield Message(op, self.shards[rank].stage, microbatch)
        if rank == self.ends.last and op == {1: STATS, 2: SUM}.get(self.program.barriers):
            yield Message(GRADIENT_MESSAGE, self.ends.last_stage, microbatch)
        if rank == self.ends.first and op == LOOKUP:
            yield Message(op, 0, microbatch)

    def _held(self, shard: ShardStep, microbatch: int) -> list[torch.Tensor]:
        boxes = [each for each in self.transport.boxes.items() if each[0].kind not in (F, B)]
        messages = [
            value for message, found in boxes if message.microbatch == microbatch for value in found
        ]
        return [*shard.held(microbatch), *messages]

    def _take(self, kind: str, stage: int, microbatch: int) -> torch.Tensor:
        (value,) = self.transport.take(Message(kind, stage, microbatch))
        return value.contiguous()

    def _bring(self, kind: str, stage: int, microbatch: int, values: list[torch.Tensor]) -> None:
        self.transport.deliver(Message(kind, stage, microbatch), values)

    def _cast(self, microbatch: int) -> None:
        own = self.ends.last in self.shards
        hidden = self._take(HIDDEN_MESSAGE, self.ends.last_stage, microbatch) if own else None
        for rank, value in self.carrier.broadcast(
            hidden, self.program.hidden, self.ends.last
        ).items():
            self._bring(CAST, self.shards[rank].stage, microbatch, [value])

    def _stats(self, microbatch: int) -> None:
        shards = self.shards.items()
        gathered = self.carrier.gather(
            {rank: self._take(S, each.stage, microbatch) for rank, each in shards}
        )
        parts = {rank: each.output.run(STATS, microbatch, [gathered]) for rank, each in shards}
        for each in self.shards.values() if self._trains else ():
            self._bring(STATS, each.stage, microbatch, [])
        if self.program.barriers == 1:
            self._sum_up(microbatch, {rank: part for rank, (part,) in parts.items()})

    def _sum(self, microbatch: int) -> None:
        parts = {rank: self._take(T, each.stage, microbatch) for rank, each in self.shards.items()}
        self._sum_up(microbatch, parts)

    def _sum_up(self, microbatch: int, parts: Mapping[int, torch.Tensor]) -> None:
        total = self.carrier.total(parts, self.ends.last)
        if total is not None:
            total = total.to(dtype_named(self.program.hidden.dtype))
            self._bring(GRADIENT_MESSAGE, self.ends.last_stage, microbatch, [total])

    def _lookup(self, microbatch: int) -> None:
        """Sum the looked up rows: one shard has a token's row, the others have zeros, so the sum is
        exact."""
        runs = {
            rank: each.lookups for rank, each in self.shards.items() if each.lookups is not None
        }
        rows = {rank: run.run(LOOKUP, microbatch, [])[0] for rank, run in runs.items()}
        total = self.carrier.total(rows, self.ends.first)
        if total is not None:
            self._bring(LOOKUP, 0, microbatch, [total])

    def _spread(self, microbatch: int) -> None:
        assert self.program.lookup is not None
        own = self.ends.first in self.shards
        gradient = self._take(ROWS_MESSAGE, 0, microbatch) if own else None
        for rank, value in self.carrier.broadcast(
            gradient, self.program.lookup.rows, self.ends.first
        ).items():
            self.shards[rank].spread[microbatch] = value


_JOBS: Mapping[str, Callable[[Collectives, int], None]] = {
    CAST: Collectives._cast,
    STATS: Collectives._stats,
    SUM: Collectives._sum,
    LOOKUP: Collectives._lookup,
    SPREAD: Collectives._spread,
}
