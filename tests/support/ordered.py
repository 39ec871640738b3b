"""Transports that pair messages as NCCL does: by the order in which both ends of a channel post
them, never by name."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from zbcompile.distributed.transport import OrderedLinks, Tensors, Transport
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.program.edges import Message

Channel = tuple[int, int]  # source rank, destination rank


@dataclass
class InOrder(Transport):
    """All ranks in one process; the k-th send of a channel arrives where its k-th receive was
    posted. `rank_of` is the schedule's."""

    rank_of: Callable[[int, int], int] = field(kw_only=True)
    sent: dict[Channel, deque[Tensors]] = field(default_factory=lambda: defaultdict(deque))
    posted: dict[Channel, deque[Message]] = field(default_factory=lambda: defaultdict(deque))

    def send(self, message: Message, tensors: Tensors, peer: int) -> None:
        source = message.stage + (-1 if message.kind == "F" else 1)
        channel = self.rank_of(source, message.microbatch), peer
        self.sent[channel].append(tensors)
        self._match(channel)

    def post(self, message: Message, specs: Sequence[TensorSpec], peer: int) -> None:
        channel = peer, self.rank_of(message.stage, message.microbatch)
        self.posted[channel].append(message)
        self._match(channel)

    def _match(self, channel: Channel) -> None:
        if self.sent[channel] and self.posted[channel]:
            self.boxes[self.posted[channel].popleft()] = self.sent[channel].popleft()

    def finish(self) -> None:
        super().finish()
        assert not any(self.sent.values())
        assert not any(self.posted.values())


class InTurn:
    """A link whose operations run one after the other, as on a stream. A send of gloo's ends when
    its receive has been posted, so one that stands behind another waits for that. What it returns
    is a work, as of an operation that may not have begun yet."""

    def __init__(self, link: Any) -> None:
        self.link, self.stream = link, ThreadPoolExecutor(1)

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        job = self.stream.submit(lambda: self.link.send(tensors, rank, tag).wait())
        return SimpleNamespace(wait=lambda: job.result(60) and None)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        job = self.stream.submit(lambda: self.link.recv(tensors, rank, tag).wait())
        return SimpleNamespace(wait=lambda: job.result(60) and None)


def in_turn(channels: OrderedLinks) -> OrderedLinks:
    """The same channels, each a stream."""
    links = (
        {peer: InTurn(x) for peer, x in d.items()} for d in (channels.outward, channels.inward)
    )
    return OrderedLinks(*links)  # type: ignore[arg-type]
