"""The collectives of the vocabulary passes: between the shards of one process, or over a separate process group.

CAST carries the last stage's output to all shards, STATS gathers what S made and, with one barrier, sums the parts of
the input gradient on the rank of the last stage; with two barriers SUM does that after T. LOOKUP sums the looked up
rows of a sharded embedding on the rank of the first stage, SPREAD carries their gradient to all shards. Every rank
posts all of them in one order (`zbcompile.schedules.lowering.collectives`) and posting never waits: `post` announces
that a rank takes part, `wait` returns once all have. `gradient` is the sum on the rank of the last stage; what LOOKUP
and SPREAD bring is in the shards. `VocabularyTransport` is a rank's transport with these beside the messages between
stages.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist

from zbcompile.distributed.packing import Buffer, empty
from zbcompile.distributed.transport import Tensors, Transport
from zbcompile.passes import gpu
from zbcompile.passes.torch_names import dtype_named
from zbcompile.passes.vocabulary.shard_program import HIDDEN
from zbcompile.runtime.vocabulary_shard_run import ShardRun
from zbcompile.schedules.ir.actions import CAST, COLLECTIVES, LOOKUP, SPREAD, STATS, SUM
from zbcompile.schedules.lowering.edges import HIDDEN_MESSAGE, ROWS_MESSAGE, Message

Job = Callable[[int], None]  # what a collective does for a microbatch


class Roots(NamedTuple):
    """The ranks of the first and of the last stage."""

    first: int
    last: int


@dataclass
class SharedCollectives:
    """All shards in one process: a collective happens when the last of them has posted it. Sums are in rank order."""

    count: int
    roots: Roots
    barriers: int
    shards: dict[int, ShardRun] = field(default_factory=dict)
    posted: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    def join(self, rank: int, shard: ShardRun) -> None:
        self.shards[rank] = shard

    def post(self, op: str, rank: int, microbatch: int) -> None:
        present = self.posted.setdefault((op, microbatch), set())
        present.add(rank)
        if len(present) == self.count:
            jobs = {CAST: self._cast, STATS: self._stats, SUM: self._sum, LOOKUP: self._lookup, SPREAD: self._spread}
            jobs[op](microbatch)

    def ready(self, op: str, microbatch: int) -> bool:
        return len(self.posted.get((op, microbatch), ())) == self.count

    def wait(self, op: str, microbatch: int) -> None:
        pass

    def gradient(self, microbatch: int) -> torch.Tensor:
        return self.gradients.pop(microbatch)

    def finish(self) -> None:
        pass

    def _cast(self, microbatch: int) -> None:
        hidden = self.shards[self.roots.last].states[microbatch][HIDDEN]
        for rank, shard in self.shards.items():
            if rank != self.roots.last:
                shard.receive(microbatch, hidden)

    def _stats(self, microbatch: int) -> None:
        gathered = torch.stack([self.shards[rank].statistics(microbatch) for rank in sorted(self.shards)])
        parts = [self.shards[rank].combine(microbatch, gathered) for rank in sorted(self.shards)]
        if self.barriers == 1:
            self.gradients[microbatch] = reduce(torch.add, [part for part in parts if part is not None])

    def _sum(self, microbatch: int) -> None:
        self.gradients[microbatch] = reduce(torch.add, [self.shards[r].part(microbatch) for r in sorted(self.shards)])

    def _lookup(self, microbatch: int) -> None:
        rows = reduce(torch.add, [self.shards[rank].look_up(microbatch) for rank in sorted(self.shards)])
        self.shards[self.roots.first].looked_up[microbatch] = rows

    def _spread(self, microbatch: int) -> None:
        gradient = self.shards[self.roots.first].spreads[microbatch]
        for shard in self.shards.values():
            shard.spreads[microbatch] = gradient


@dataclass
class GroupCollectives:
    """This process is one rank of `group`. Collectives run in the order of their posts beside the passes: on a
    separate thread if the host carries them out (gloo), on `stream` on CUDA."""

    group: dist.ProcessGroup
    roots: Roots
    device: torch.device
    stream: gpu.Stream | None = None
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    complete: "dict[tuple[str, int], Future[None]]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "zbcompile-collectives") if self.stream is None else None
        self._events: dict[tuple[str, int], gpu.Event] = {}

    def join(self, rank: int, shard: ShardRun) -> None:
        self.shard = shard

    def post(self, op: str, rank: int, microbatch: int) -> None:
        job = {CAST: self._cast, STATS: self._stats, SUM: self._sum, LOOKUP: self._lookup, SPREAD: self._spread}[op]
        if self._thread is not None:
            self.complete[op, microbatch] = self._thread.submit(torch.no_grad()(job), microbatch)
        else:
            self._on_stream(job, op, microbatch)

    def _on_stream(self, job: Job, op: str, microbatch: int) -> None:
        """Run after everything that the compute stream has been given so far; a wait makes the compute stream wait."""
        assert self.stream is not None
        for value in (*self.shard.states.get(microbatch, {}).values(), *self._of_input_layer):
            value.record_stream(self.stream)  # otherwise its memory could be reused while it is sent
        self.stream.wait_stream(gpu.current_stream(self.device))
        with gpu.on_stream(self.stream):
            job(microbatch)
        event = self._events[op, microbatch] = gpu.Event()
        event.record(self.stream)

    def ready(self, op: str, microbatch: int) -> bool:
        return True

    def wait(self, op: str, microbatch: int) -> None:
        if self._thread is not None:
            self.complete[op, microbatch].result()
            return
        stream = gpu.current_stream(self.device)
        stream.wait_event(self._events[op, microbatch])
        for value in (*self.shard.states.get(microbatch, {}).values(), *self._of_input_layer):
            value.record_stream(stream)

    @property
    def _of_input_layer(self) -> list[torch.Tensor]:
        return [*self.shard.looked_up.values(), *self.shard.spreads.values()]

    def gradient(self, microbatch: int) -> torch.Tensor:
        found = self.gradients.pop(microbatch)
        if self.stream is not None:
            found.record_stream(gpu.current_stream(self.device))
        return found

    def finish(self) -> None:
        """Every collective has ended (on CUDA, for what the compute stream is given next); raises what failed."""
        for each in self.complete.values():
            each.result()
        if self.stream is not None:
            gpu.current_stream(self.device).wait_stream(self.stream)
        if self._thread is not None:
            self._thread.shutdown()

    def _is(self, rank: int) -> bool:
        return dist.get_rank(self.group) == rank

    def _cast(self, microbatch: int) -> None:
        if not self._is(self.roots.last):
            self.shard.receive(microbatch, empty(self.shard.shard.program.hidden, self.device))
        dist.broadcast(self.shard.states[microbatch][HIDDEN], group=self.group, group_src=self.roots.last)

    def _lookup(self, microbatch: int) -> None:
        """Sum the looked-up rows: one shard has a token's row, the others have zeros, so the sum is exact."""
        part = self.shard.look_up(microbatch).contiguous()
        dist.reduce(part, group=self.group, group_dst=self.roots.first)
        if self._is(self.roots.first):
            self.shard.looked_up[microbatch] = part

    def _spread(self, microbatch: int) -> None:
        lookup = self.shard.shard.program.lookup
        assert lookup is not None
        if not self._is(self.roots.first):
            self.shard.spreads[microbatch] = empty(lookup.rows, self.device)
        dist.broadcast(self.shard.spreads[microbatch], group=self.group, group_src=self.roots.first)

    def _stats(self, microbatch: int) -> None:
        own = self.shard.statistics(microbatch)
        gathered = own.new_empty(dist.get_world_size(self.group), *own.shape)
        dist.all_gather(list(gathered.unbind(0)), own, group=self.group)
        part = self.shard.combine(microbatch, gathered)
        if part is not None:
            self._reduce(microbatch, part)

    def _sum(self, microbatch: int) -> None:
        self._reduce(microbatch, self.shard.part(microbatch))

    def _reduce(self, microbatch: int, part: torch.Tensor) -> None:
        part = part.contiguous()
        dist.reduce(part, group=self.group, group_dst=self.roots.last)
        if self._is(self.roots.last):
            self.gradients[microbatch] = part


Collectives = SharedCollectives | GroupCollectives


@dataclass
class VocabularyTransport:
    """A rank's transport with the collectives beside the messages between stages.

    Gradients of a sharded embedding arrive with SPREAD and wait until a collective that was posted after it is
    awaited: then they have certainly arrived, and are always added at the same place of the step. `spread` are the
    microbatches in the order of their posts, of which `added` have been added; `before` says how many were posted
    before another collective.
    """

    rank: int
    messages: Transport
    shard: ShardRun
    collectives: Collectives
    spread: list[int] = field(default_factory=list)
    added: int = 0
    before: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def is_root(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.rank == self.collectives.roots.last

    def announce(self, op: str, microbatch: int) -> None:
        """Take part in a collective."""
        if op == SPREAD:
            self.spread.append(microbatch)
        self.before[op, microbatch] = len(self.spread)
        self.collectives.post(op, self.rank, microbatch)

    def deliver(self, message: Message, tensors: Tensors) -> None:
        if message.kind == HIDDEN_MESSAGE:
            self.shard.receive(message.microbatch, tensors[0].contiguous())
        elif message.kind == ROWS_MESSAGE:
            self.shard.spreads[message.microbatch] = tensors[0].contiguous()
        else:
            self.messages.deliver(message, tensors)

    def send(self, message: Message, tensors: Tensors, peer: int) -> None:
        self.messages.send(message, tensors, peer)

    def post(self, message: Message, buffers: Sequence[Buffer], peer: int) -> None:
        self.messages.post(message, buffers, peer)

    def ready(self, message: Message) -> bool:
        if message.kind in COLLECTIVES:
            return self.collectives.ready(message.kind, message.microbatch)
        return self.messages.ready(message)

    def wait(self, message: Message) -> None:
        if message.kind in COLLECTIVES:
            self.collectives.wait(message.kind, message.microbatch)
            self._add_rows(self.before[message.kind, message.microbatch])
        else:
            self.messages.wait(message)

    def take(self, message: Message) -> Tensors:
        if message.kind not in COLLECTIVES:
            return self.messages.take(message)
        if message.kind == LOOKUP:
            return [self.shard.looked_up.pop(message.microbatch)]
        gradient = self.collectives.gradient(message.microbatch)
        return [gradient.to(dtype_named(self.shard.shard.program.hidden.dtype))]

    def complete(self, messages: Sequence[Message]) -> None:
        self.messages.complete(messages)

    def finish(self) -> None:
        self.collectives.finish()
        self._add_rows(len(self.spread))
        self.messages.finish()

    def _add_rows(self, count: int) -> None:
        """Add the gradients of the first `count` posted microbatches that have not been added yet."""
        with torch.no_grad():
            for microbatch in self.spread[self.added : count]:
                self.shard.spread(microbatch)
        self.added = max(self.added, count)
