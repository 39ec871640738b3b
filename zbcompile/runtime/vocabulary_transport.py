"""The transport of a rank if the output layer is sharded: messages between stages, and the collectives."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zbcompile.distributed.boundary_messages import HIDDEN_MESSAGE, ROWS_MESSAGE, Buffer, Message
from zbcompile.distributed.transport import Tensors, Transport
from zbcompile.runtime.vocabulary_collectives import Collectives
from zbcompile.runtime.vocabulary_shard_run import ShardRun
from zbcompile.schedules.ir.actions import COLLECTIVES, LOOKUP, SPREAD


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
        return [gradient.to(getattr(torch, self.shard.shard.program.hidden.dtype))]

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
