"""The collectives of the vocabulary passes: between the shards of one process, or over a process group of their own.

CAST carries the last stage's output to all shards, STATS gathers what S made and, with one barrier, sums the parts of
the input gradient on the rank of the last stage; with two barriers SUM does that after T. Every rank posts all of them
in one order (`zbcompile.schedules.collectives`) and posting never waits.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from zbcompile.passes.vocabulary_program import HIDDEN
from zbcompile.rank_plan import HIDDEN_MESSAGE, Buffer, Message
from zbcompile.schedules.actions import CAST, COLLECTIVES, STATS, SUM
from zbcompile.transport import Tensors, Transport
from zbcompile.vocabulary_run import ShardRun

KINDS = frozenset((HIDDEN_MESSAGE, *COLLECTIVES))


class Collectives(Protocol):
    """`post` announces that a rank takes part, `wait` returns once it is complete; `gradient` is the sum on the rank of
    the last stage."""

    @property
    def root(self) -> int: ...
    def join(self, rank: int, shard: ShardRun) -> None: ...
    def post(self, op: str, rank: int, microbatch: int) -> None: ...
    def ready(self, op: str, microbatch: int) -> bool: ...
    def wait(self, op: str, microbatch: int) -> None: ...
    def gradient(self, microbatch: int) -> torch.Tensor: ...
    def finish(self) -> None: ...


@dataclass
class SharedCollectives:
    """All shards in one process: a collective happens when the last of them has posted it. Sums are in rank order."""

    count: int
    root: int
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
            {CAST: self._cast, STATS: self._stats, SUM: self._sum}[op](microbatch)

    def ready(self, op: str, microbatch: int) -> bool:
        return len(self.posted.get((op, microbatch), ())) == self.count

    def wait(self, op: str, microbatch: int) -> None:
        pass

    def gradient(self, microbatch: int) -> torch.Tensor:
        return self.gradients.pop(microbatch)

    def finish(self) -> None:
        pass

    def _cast(self, microbatch: int) -> None:
        hidden = self.shards[self.root].states[microbatch][HIDDEN]
        for rank, shard in self.shards.items():
            if rank != self.root:
                shard.receive(microbatch, hidden)

    def _stats(self, microbatch: int) -> None:
        gathered = torch.stack([self.shards[rank].statistics(microbatch) for rank in sorted(self.shards)])
        parts = [self.shards[rank].combine(microbatch, gathered) for rank in sorted(self.shards)]
        if self.barriers == 1:
            self.gradients[microbatch] = _sum_in_order([part for part in parts if part is not None])

    def _sum(self, microbatch: int) -> None:
        self.gradients[microbatch] = _sum_in_order([self.shards[r].part(microbatch) for r in sorted(self.shards)])


def _sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@dataclass
class GroupCollectives:
    """This process is one rank of `group`. Collectives run in the order of their posts beside the passes: on a thread
    of their own where the host carries them out (gloo), on `stream` on CUDA."""

    group: dist.ProcessGroup
    root: int
    device: torch.device
    stream: torch.cuda.Stream | None = None
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    complete: "dict[tuple[str, int], Future[None]]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "zbcompile-collectives") if self.stream is None else None
        self._events: dict[tuple[str, int], torch.cuda.Event] = {}

    def join(self, rank: int, shard: ShardRun) -> None:
        self.shard = shard

    def post(self, op: str, rank: int, microbatch: int) -> None:
        job = {CAST: self._cast, STATS: self._stats, SUM: self._sum}[op]
        if self._thread is not None:
            self.complete[op, microbatch] = self._thread.submit(torch.no_grad()(job), microbatch)
        else:
            self._on_stream(op, microbatch)

    def _on_stream(self, op: str, microbatch: int) -> None:
        """Behind what the compute stream has been given so far; whoever waits makes the compute stream wait."""
        assert self.stream is not None
        for value in self.shard.states.get(microbatch, {}).values():
            value.record_stream(self.stream)  # else its memory could be used again while it is sent
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            {CAST: self._cast, STATS: self._stats, SUM: self._sum}[op](microbatch)
        event = self._events[op, microbatch] = torch.cuda.Event()
        event.record(self.stream)

    def ready(self, op: str, microbatch: int) -> bool:
        return True

    def wait(self, op: str, microbatch: int) -> None:
        if self._thread is not None:
            self.complete[op, microbatch].result()
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._events[op, microbatch])
        for value in self.shard.states.get(microbatch, {}).values():
            value.record_stream(stream)

    def gradient(self, microbatch: int) -> torch.Tensor:
        found = self.gradients.pop(microbatch)
        if self.stream is not None:
            found.record_stream(torch.cuda.current_stream(self.device))
        return found

    def finish(self) -> None:
        """Every collective has ended; raises what failed."""
        for each in self.complete.values():
            each.result()
        if self._thread is not None:
            self._thread.shutdown()

    @property
    def _is_root(self) -> bool:
        return dist.get_rank(self.group) == self.root

    def _cast(self, microbatch: int) -> None:
        spec = self.shard.shard.program.hidden
        if not self._is_root:
            hidden = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.device)
            self.shard.receive(microbatch, hidden)
        dist.broadcast(self.shard.states[microbatch][HIDDEN], group=self.group, group_src=self.root)

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
        dist.reduce(part, group=self.group, group_dst=self.root)
        if self._is_root:
            self.gradients[microbatch] = part


@dataclass
class VocabularyTransport:
    """A rank's transport with the collectives beside the messages between stages."""

    rank: int
    messages: Transport
    shard: ShardRun
    collectives: Collectives

    @property
    def is_root(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.rank == self.collectives.root

    def announce(self, op: str, microbatch: int) -> None:
        """Take part in a collective."""
        self.collectives.post(op, self.rank, microbatch)

    def deliver(self, message: Message, tensors: Tensors) -> None:
        if message.kind == HIDDEN_MESSAGE:
            self.shard.receive(message.microbatch, tensors[0].contiguous())
        else:
            self.messages.deliver(message, tensors)

    def send(self, message: Message, tensors: Tensors, peer: int) -> None:
        self.messages.send(message, tensors, peer)

    def post(self, message: Message, buffers: Sequence[Buffer], peer: int) -> None:
        self.messages.post(message, buffers, peer)

    def ready(self, message: Message) -> bool:
        if message.kind in KINDS:
            return self.collectives.ready(message.kind, message.microbatch)
        return self.messages.ready(message)

    def wait(self, message: Message) -> None:
        if message.kind in KINDS:
            self.collectives.wait(message.kind, message.microbatch)
        else:
            self.messages.wait(message)

    def take(self, message: Message) -> Tensors:
        if message.kind not in KINDS:
            return self.messages.take(message)
        gradient = self.collectives.gradient(message.microbatch)
        return [gradient.to(getattr(torch, self.shard.shard.program.hidden.dtype))]

    def complete(self, messages: Sequence[Message]) -> None:
        self.messages.complete(messages)

    def finish(self) -> None:
        self.collectives.finish()
        self.messages.finish()
