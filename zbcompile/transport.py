"""How boundary tensors travel: through mailboxes inside one process, or through point-to-point messages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from zbcompile.errors import PipelineError
from zbcompile.passes.slots import TensorSpec


class Message(NamedTuple):
    """What travels: the `F` or `B` values that arrive at `stage` for `microbatch`."""

    kind: str
    stage: int
    microbatch: int


class Transport(Protocol):
    """Moves messages between stages.

    `deliver` is for a stage on the same rank; `post` announces a receive; `ready` says whether `wait` may be called,
    which returns once the message is there.
    """

    def deliver(self, message: Message, tensors: list[torch.Tensor]) -> None: ...
    def send(self, message: Message, tensors: list[torch.Tensor], peer: int) -> None: ...
    def post(self, message: Message, specs: Sequence[TensorSpec], peer: int) -> None: ...
    def ready(self, message: Message) -> bool: ...
    def wait(self, message: Message) -> None: ...
    def take(self, message: Message) -> list[torch.Tensor]: ...
    def finish(self) -> None: ...


@dataclass
class Mailboxes:
    """All ranks in one process: a message is there as soon as it is sent."""

    boxes: dict[Message, list[torch.Tensor]] = field(default_factory=dict)

    def deliver(self, message: Message, tensors: list[torch.Tensor]) -> None:
        self.boxes[message] = tensors

    def send(self, message: Message, tensors: list[torch.Tensor], peer: int) -> None:
        self.boxes[message] = tensors

    def post(self, message: Message, specs: Sequence[TensorSpec], peer: int) -> None:
        pass

    def ready(self, message: Message) -> bool:
        return message in self.boxes

    def wait(self, message: Message) -> None:
        pass

    def take(self, message: Message) -> list[torch.Tensor]:
        return self.boxes.pop(message)

    def finish(self) -> None:
        if self.boxes:
            raise PipelineError(f"the step ended with messages that no stage took: {sorted(self.boxes)}")


@dataclass
class Channels:
    """The process groups that carry messages: one per direction, so that what a pair of ranks says to each other in the
    two directions never shares a NCCL communicator, whose operations run strictly one after the other."""

    up: dist.ProcessGroup
    down: dist.ProcessGroup
    rank: int
    microbatches: int

    def group(self, source: int, destination: int) -> dist.ProcessGroup:
        return self.up if source < destination else self.down

    def tag(self, message: Message, index: int) -> int:
        """A tag of its own for every tensor: gloo pairs messages of equal tags by order alone."""
        number = (message.stage * 2 + (message.kind == "B")) * self.microbatches + message.microbatch
        return number * 64 + index


class Receive(NamedTuple):
    """A posted receive: the buffers it fills and what to wait for."""

    buffers: list[torch.Tensor]
    works: list[dist.Work]


@dataclass
class PointToPoint:
    """Messages between processes. Sends are kept alive until they are complete."""

    channels: Channels
    device: torch.device
    boxes: dict[Message, list[torch.Tensor]] = field(default_factory=dict)
    receives: dict[Message, Receive] = field(default_factory=dict)
    sends: list[tuple[torch.Tensor, dist.Work]] = field(default_factory=list)

    def deliver(self, message: Message, tensors: list[torch.Tensor]) -> None:
        self.boxes[message] = tensors

    def send(self, message: Message, tensors: list[torch.Tensor], peer: int) -> None:
        group = self.channels.group(self.channels.rank, peer)
        self.sends = [(tensor, work) for tensor, work in self.sends if not work.is_completed()]
        for index, tensor in enumerate(tensors):
            flat = as_contiguous(tensor)
            work = dist.isend(flat, group=group, group_dst=peer, tag=self.channels.tag(message, index))
            if work is not None:
                self.sends.append((flat, work))

    def post(self, message: Message, specs: Sequence[TensorSpec], peer: int) -> None:
        group = self.channels.group(peer, self.channels.rank)
        buffers = [self._allocate(spec) for spec in specs]
        works = []
        for index, buffer in enumerate(buffers):
            flat = as_contiguous(buffer)
            work = dist.irecv(flat, group=group, group_src=peer, tag=self.channels.tag(message, index))
            if work is not None:
                works.append(work)
        self.receives[message] = Receive(buffers, works)

    def _allocate(self, spec: TensorSpec) -> torch.Tensor:
        return torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device=self.device)

    def ready(self, message: Message) -> bool:
        return True

    def wait(self, message: Message) -> None:
        if message in self.receives:
            for work in self.receives[message].works:
                work.wait()

    def take(self, message: Message) -> list[torch.Tensor]:
        if message in self.boxes:
            return self.boxes.pop(message)
        return self.receives.pop(message).buffers

    def finish(self) -> None:
        for _, work in self.sends:
            work.wait()
        self.sends.clear()
        if self.boxes or self.receives:
            raise PipelineError(f"the step ended with messages not taken: {sorted([*self.boxes, *self.receives])}")


def as_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous view of the same memory: dimensions in order of their strides. Backends send nothing else."""
    if tensor.is_contiguous():
        return tensor
    order = sorted(range(tensor.ndim), key=lambda i: (tensor.stride(i), tensor.shape[i]), reverse=True)
    return tensor.permute(order)
