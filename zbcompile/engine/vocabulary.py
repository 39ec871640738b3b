"""Collectives among the shards of an output layer, between their passes.

BROADCAST sends the last stage's output to all shards. STATS gathers the statistics of S and, with
one barrier, sums the parts of the input gradient on the rank of the last stage; with two barriers
INPUT_GRAD does that after T. EMBED sums the rows of a sharded embedding on the rank of the first
stage, EMBED_GRAD broadcasts their gradient. Every rank posts all of them in one order
(`zbcompile.schedules.lowering.collectives`), and posting does not block. Their inputs and outputs
are messages of the transport.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zbcompile.distributed.transport import Transport, empty
from zbcompile.engine.stage import StageRun
from zbcompile.passes import gpu
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.torch_names import dtype_named
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram
from zbcompile.program.edges import GRADIENT_MESSAGE, HIDDEN_MESSAGE, ROWS_MESSAGE, Message
from zbcompile.schedules.ir.actions import (
    BROADCAST,
    EMBED,
    EMBED_GRAD,
    INPUT_GRAD,
    STATS,
    B,
    F,
    S,
    T,
)

Job = Callable[[], None]


class EndRanks(NamedTuple):
    """The ranks of the first and of the last stage, and the number of the last stage."""

    first: int
    last: int
    last_stage: int


@dataclass
class LocalCollectives:
    """Collectives among `count` shards in one process. One runs when the last shard has posted it;
    sums are in rank order."""

    count: int
    posted: Counter[tuple[str, int]] = field(default_factory=Counter)

    def start(self, op: str, microbatch: int, job: Job, tensors: Callable[[], list[Tensor]]) -> Job:
        """Runs the collective once all shards have posted it. Returns a function that does
        nothing."""
        self.posted[op, microbatch] += 1
        if self.posted[op, microbatch] == self.count:
            job()
        return lambda: None

    def broadcast(self, value: Tensor | None, like: TensorSpec, root: int) -> dict[int, Tensor]:
        assert value is not None
        return dict.fromkeys(range(self.count), value)

    def gather(self, values: Mapping[int, Tensor]) -> Tensor:
        return torch.stack([values[rank] for rank in sorted(values)])

    def reduce_sum(self, values: Mapping[int, Tensor], root: int) -> Tensor | None:
        return reduce(torch.add, [values[rank] for rank in sorted(values)])

    def finish(self) -> None:
        pass


@dataclass
class GroupCollectives:
    """Collectives of a process that is one rank of `group`.

    They run in the order of their posts alongside the passes: on a thread with gloo, on `stream`
    on CUDA.
    """

    group: dist.ProcessGroup
    device: torch.device
    stream: gpu.Stream | None
    started: "list[Future[None]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = (
            ThreadPoolExecutor(1, "zbcompile-collectives") if self.stream is None else None
        )

    def start(self, op: str, microbatch: int, job: Job, tensors: Callable[[], list[Tensor]]) -> Job:
        """Starts the collective, which uses `tensors`. Returns a function that completes it."""
        if self._thread is None:
            return self._on_stream(job, tensors)
        self.started.append(self._thread.submit(torch.no_grad()(job)))
        return self.started[-1].result

    def _on_stream(self, job: Job, tensors: Callable[[], list[Tensor]]) -> Job:
        """Runs the job after the work that the compute stream has so far. A wait makes the compute
        stream wait. The allocator must know which tensors the other stream uses."""
        assert self.stream is not None
        for value in tensors():
            value.record_stream(self.stream)
        self.stream.wait_stream(gpu.current_stream(self.device))
        with gpu.on_stream(self.stream):
            job()
        event = gpu.Event()
        event.record(self.stream)

        def wait() -> None:
            stream = gpu.current_stream(self.device)
            stream.wait_event(event)
            for value in tensors():
                value.record_stream(stream)

        return wait

    def broadcast(self, value: Tensor | None, like: TensorSpec, root: int) -> dict[int, Tensor]:
        value = empty(like, self.device) if value is None else value
        dist.broadcast(value, group=self.group, group_src=root)
        return {dist.get_rank(self.group): value}

    def gather(self, values: Mapping[int, Tensor]) -> Tensor:
        (value,) = values.values()
        gathered = value.new_empty(dist.get_world_size(self.group), *value.shape)
        dist.all_gather(list(gathered.unbind(0)), value, group=self.group)
        return gathered

    def reduce_sum(self, values: Mapping[int, Tensor], root: int) -> Tensor | None:
        ((rank, part),) = values.items()
        part = part.contiguous()
        dist.reduce(part, group=self.group, group_dst=root)
        return part if rank == root else None

    def finish(self) -> None:
        """Completes all collectives. Raises the error of one that failed."""
        for future in self.started:
            future.result()
        if self.stream is not None:
            gpu.current_stream(self.device).wait_stream(self.stream)
        if self._thread is not None:
            self._thread.shutdown()


@dataclass
class ShardStep:
    """A rank's shard during one step.

    Attributes:
        stage: The first stage of the rank, which names the shard in actions.
        output: The passes of the output layer.
        lookups: The passes of the embedding.
        spread: Gradients of looked up rows by microbatch. They are added when a collective that was
            posted after their EMBED_GRAD has ended, so always at the same place of the step.
        posted: The microbatches in the order of their EMBED_GRAD; the first `added` are added.
    """

    stage: int
    output: StageRun
    lookups: StageRun | None
    spread: dict[int, Tensor] = field(default_factory=dict)
    posted: list[int] = field(default_factory=list)
    added: int = 0

    def add_rows(self, count: int) -> None:
        """Adds the gradients of the first `count` posted microbatches."""
        for microbatch in self.posted[self.added : count]:
            assert self.lookups is not None
            self.lookups.run(EMBED_GRAD, microbatch, [self.spread.pop(microbatch)])
        self.added = max(self.added, count)

    def tensors(self, microbatch: int) -> Iterator[Tensor]:
        """Yields the registers of a microbatch, and all gradients of rows."""
        frame = self.output.frames.get(microbatch, [])
        yield from (value for value in frame if value is not None)
        yield from self.spread.values()


@dataclass
class Collectives:
    """The collectives of one step, among the `shards` of this process by rank."""

    program: VocabularyProgram
    ends: EndRanks
    backend: LocalCollectives | GroupCollectives
    transport: Transport
    shards: dict[int, ShardStep] = field(default_factory=dict)

    def post(self, op: str, rank: int, microbatch: int) -> None:
        """Starts a rank's part of a collective."""
        shard = self.shards[rank]
        if op == EMBED_GRAD:
            shard.posted.append(microbatch)
        complete = self.backend.start(
            op,
            microbatch,
            partial(_JOBS[op], self, microbatch),
            partial(self._tensors, shard, microbatch),
        )
        count = len(shard.posted)

        def wait() -> None:
            """Completes the collective, then adds the gradients of rows that were posted before."""
            complete()
            shard.add_rows(count)

        for message in self._outputs(op, rank, microbatch):
            self.transport.receives[message] = [wait]

    def finish(self, rank: int) -> None:
        """Completes all collectives, and adds all gradients of rows of a rank."""
        self.backend.finish()
        self.shards[rank].add_rows(len(self.shards[rank].posted))

    @property
    def _trains(self) -> bool:
        return self.program.barriers > 0

    def _outputs(self, op: str, rank: int, microbatch: int) -> Iterator[Message]:
        """Yields the messages that a collective delivers on a rank."""
        if op == BROADCAST or (op == STATS and self._trains):
            yield Message(op, self.shards[rank].stage, microbatch)
        if rank == self.ends.last and op == {1: STATS, 2: INPUT_GRAD}.get(self.program.barriers):
            yield Message(GRADIENT_MESSAGE, self.ends.last_stage, microbatch)
        if rank == self.ends.first and op == EMBED:
            yield Message(op, 0, microbatch)

    def _tensors(self, shard: ShardStep, microbatch: int) -> list[Tensor]:
        messages = [
            value
            for message, values in self.transport.boxes.items()
            if message.kind not in (F, B) and message.microbatch == microbatch
            for value in values
        ]
        return [*shard.tensors(microbatch), *messages]

    def _take(self, kind: str, stage: int, microbatch: int) -> Tensor:
        (value,) = self.transport.take(Message(kind, stage, microbatch))
        return value.contiguous()

    def _deliver(self, kind: str, stage: int, microbatch: int, values: list[Tensor]) -> None:
        self.transport.deliver(Message(kind, stage, microbatch), values)

    def _cast(self, microbatch: int) -> None:
        hidden = None
        if self.ends.last in self.shards:
            hidden = self._take(HIDDEN_MESSAGE, self.ends.last_stage, microbatch)
        values = self.backend.broadcast(hidden, self.program.hidden, self.ends.last)
        for rank, value in values.items():
            self._deliver(BROADCAST, self.shards[rank].stage, microbatch, [value])

    def _stats(self, microbatch: int) -> None:
        shards = self.shards.items()
        gathered = self.backend.gather(
            {rank: self._take(S, shard.stage, microbatch) for rank, shard in shards}
        )
        parts = {rank: shard.output.run(STATS, microbatch, [gathered]) for rank, shard in shards}
        for _, shard in shards if self._trains else ():
            self._deliver(STATS, shard.stage, microbatch, [])
        if self.program.barriers == 1:
            self._sum_up(microbatch, {rank: part for rank, (part,) in parts.items()})

    def _sum(self, microbatch: int) -> None:
        parts = {
            rank: self._take(T, shard.stage, microbatch) for rank, shard in self.shards.items()
        }
        self._sum_up(microbatch, parts)

    def _sum_up(self, microbatch: int, parts: Mapping[int, Tensor]) -> None:
        total = self.backend.reduce_sum(parts, self.ends.last)
        if total is not None:
            total = total.to(dtype_named(self.program.hidden.dtype))
            self._deliver(GRADIENT_MESSAGE, self.ends.last_stage, microbatch, [total])

    def _lookup(self, microbatch: int) -> None:
        """Sums the rows that were looked up. One shard has a token's row and the others have
        zeros, so the sum is exact."""
        rows = {}
        for rank, shard in self.shards.items():
            if shard.lookups is not None:
                (rows[rank],) = shard.lookups.run(EMBED, microbatch, [])
        total = self.backend.reduce_sum(rows, self.ends.first)
        if total is not None:
            self._deliver(EMBED, 0, microbatch, [total])

    def _spread(self, microbatch: int) -> None:
        assert self.program.lookup is not None
        gradient = None
        if self.ends.first in self.shards:
            gradient = self._take(ROWS_MESSAGE, 0, microbatch)
        values = self.backend.broadcast(gradient, self.program.lookup, self.ends.first)
        for rank, value in values.items():
            self.shards[rank].spread[microbatch] = value


_JOBS: Mapping[str, Callable[[Collectives, int], None]] = {
    BROADCAST: Collectives._cast,
    STATS: Collectives._stats,
    INPUT_GRAD: Collectives._sum,
    EMBED: Collectives._lookup,
    EMBED_GRAD: Collectives._spread,
}
