"""How boundary tensors travel: through mailboxes inside one process, or through point-to-point messages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from zbcompile.distributed.channels import Channels
from zbcompile.distributed.packing import Buffer, Message, as_contiguous, packed, packed_buffer
from zbcompile.errors import PipelineError

Tensors = list[torch.Tensor]


class Transport(Protocol):
    """Moves messages between stages.

    `deliver` is for a stage on the same rank; `post` announces a receive into buffers; `ready` says whether `wait` may
    be called, which returns once the message has arrived; `complete` releases sends that are known to have arrived.
    """

    def deliver(self, message: Message, tensors: Tensors) -> None: ...
    def send(self, message: Message, tensors: Tensors, peer: int) -> None: ...
    def post(self, message: Message, buffers: Sequence[Buffer], peer: int) -> None: ...
    def ready(self, message: Message) -> bool: ...
    def wait(self, message: Message) -> None: ...
    def take(self, message: Message) -> Tensors: ...
    def complete(self, messages: Sequence[Message]) -> None: ...
    def finish(self) -> None: ...


@dataclass
class Mailboxes:
    """All ranks in one process: a message arrives as soon as it is sent."""

    boxes: dict[Message, Tensors] = field(default_factory=dict)

    def deliver(self, message: Message, tensors: Tensors) -> None:
        self.boxes[message] = tensors

    def send(self, message: Message, tensors: Tensors, peer: int) -> None:
        self.boxes[message] = tensors

    def post(self, message: Message, buffers: Sequence[Buffer], peer: int) -> None:
        pass

    def ready(self, message: Message) -> bool:
        return message in self.boxes

    def wait(self, message: Message) -> None:
        pass

    def take(self, message: Message) -> Tensors:
        return self.boxes.pop(message)

    def complete(self, messages: Sequence[Message]) -> None:
        pass

    def finish(self) -> None:
        if self.boxes:
            raise PipelineError(f"the step ended with messages that no stage took: {sorted(self.boxes)}")


@dataclass
class ReceiveBuffers:
    """The memory that messages arrive in, made at first use and kept over steps. `rank_plan` says who has it when.

    On CUDA no event is needed between the last reader and the next message: a backend orders its transfer behind
    whatever the compute stream was given before the receive was posted, and every reader was.
    """

    device: torch.device
    made: dict[Buffer, torch.Tensor] = field(default_factory=dict)

    def get(self, buffer: Buffer) -> torch.Tensor:
        found = self.made.get(buffer)
        if found is None:
            found = packed_buffer(buffer.spec, self.device)
            if buffer.number >= 0:
                self.made[buffer] = found
        return found


@dataclass
class PointToPoint:
    """Messages between processes.

    Nothing here blocks the host on CUDA: `wait` on an NCCL work makes the compute stream wait for an event of the
    channel's stream, and both ends of a message start when the compute stream reaches where they were posted. A sent
    tensor is held until its work has been waited for, so the caching allocator cannot hand out its memory while it is
    being read; `complete` only waits for what is known to be over, so the compute stream does not stand still there.
    """

    channels: Channels
    buffers: ReceiveBuffers
    boxes: dict[Message, Tensors] = field(default_factory=dict)
    receives: dict[Message, list[dist.Work]] = field(default_factory=dict)
    sends: dict[Message, list[tuple[torch.Tensor, dist.Work]]] = field(default_factory=dict)

    def deliver(self, message: Message, tensors: Tensors) -> None:
        self.boxes[message] = tensors

    def send(self, message: Message, tensors: Tensors, peer: int) -> None:
        works = self.sends[message] = []
        for index, tensor in enumerate(tensors):
            flat = as_contiguous(packed(tensor))
            works.append((flat, self.channels.send(flat, message, index, peer)))

    def post(self, message: Message, buffers: Sequence[Buffer], peer: int) -> None:
        tensors = self.boxes[message] = [self.buffers.get(buffer) for buffer in buffers]
        self.receives[message] = [
            self.channels.receive(as_contiguous(tensor), message, index, peer) for index, tensor in enumerate(tensors)
        ]

    def ready(self, message: Message) -> bool:
        return True

    def wait(self, message: Message) -> None:
        for work in self.receives.pop(message, ()):
            work.wait()

    def take(self, message: Message) -> Tensors:
        return self.boxes.pop(message)

    def complete(self, messages: Sequence[Message]) -> None:
        for message in messages:
            for _, work in self.sends.pop(message):
                work.wait()

    def finish(self) -> None:
        self.complete(list(self.sends))
        if self.boxes:
            raise PipelineError(f"the step ended with messages not taken: {sorted(self.boxes)}")
