"""Transports for boundary tensors: mailboxes inside one process, or point-to-point messages over
channels between ranks.

gloo pairs messages by their tags, so one process group carries them all. NCCL has no tags: it pairs
the operations of a communicator by their order, and runs them on one stream, one after the other.
Two things can go wrong there. A send may be queued behind a receive that was posted early, for a
message that is made from what is sent: so no two channels may share a communicator, not the two
directions of a pair of ranks (which share one by default), nor the pairs of a group (which do once
it is bound to a device, `init_process_group(device_id=...)`). And both ends may post in different
orders. So every channel, from one rank to another, has a separate group, and
`zbcompile.schedules.lowering.lower` places messages so that both ends post the same ones in the
same order, which `zbcompile.schedules.check` proves. Each group has its own stream, so that a
channel waits neither for another one nor for the passes."""

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbcompile.errors import PipelineError
from zbcompile.faults.watch import UNUSED_TAG
from zbcompile.passes import gpu
from zbcompile.passes.graph.roles import TensorSpec
from zbcompile.passes.graph.strides import is_dense, packed_layout
from zbcompile.passes.torch_names import dtype_named
from zbcompile.program.edges import Message
from zbcompile.torch_private import gloo_link, nccl_link

Pair = tuple[int, int]  # source rank, destination rank
SOURCE, DESTINATION = 0, 1  # the ranks of a link
LONGER = 2.0  # seconds for which gloo waits on when the watch should have ended the wait


def patience(backend: str, timeout: float) -> timedelta:
    """How long torch waits in a group before it gives up: longer than this package's watch, which
    says why. With NCCL torch then ends the process."""
    return timedelta(seconds=2 * timeout if backend == gpu.BACKEND else timeout + LONGER)


@dataclass(frozen=True)
class TaggedLinks:
    """One group for all messages, every tensor with its own tag: gloo pairs equal tags by order
    alone. `send` and `receive` start moving one tensor, the `index`-th of a message, and return a
    work to wait for.

    Tags begin at a number of the call that all ranks make: a rank that makes another call by
    mistake never matches it. gloo would hand it a message of the wrong size, and end the process if
    that does not fit.
    """

    group: dist.ProcessGroup
    microbatches: int
    call: str

    def send(self, tensor: Tensor, message: Message, index: int, peer: int) -> dist.Work:
        return self.group.send([tensor], peer, self._tag(message, index))

    def receive(self, tensor: Tensor, message: Message, index: int, peer: int) -> dist.Work:
        return self.group.recv([tensor], peer, self._tag(message, index))

    def _tag(self, message: Message, index: int) -> int:
        number = (
            message.stage * 2 + (message.kind == "B")
        ) * self.microbatches + message.microbatch
        return (zlib.crc32(self.call.encode()) + number * 64 + index) % (UNUSED_TAG - 1) + 1


@dataclass
class OrderedLinks:
    """A link per channel, to and from every peer; messages have no tags, only their order."""

    outward: dict[int, Any] = field(default_factory=dict)
    inward: dict[int, Any] = field(default_factory=dict)

    def send(self, tensor: Tensor, message: Message, index: int, peer: int) -> dist.Work:
        return self.outward[peer].send([tensor], DESTINATION, 0)

    def receive(self, tensor: Tensor, message: Message, index: int, peer: int) -> dist.Work:
        return self.inward[peer].recv([tensor], SOURCE, 0)

    def open(
        self,
        backend: str,
        pairs: Iterable[Pair],
        rank: int,
        store: dist.Store,
        device: torch.device,
        timeout: float,
    ) -> list[Any]:
        """Opens those of the channels `pairs` that begin or end at `rank` and are not open. Returns
        their links. All ranks must call it, with the same `pairs`; only they use `store`.

        Opening a channel blocks until the other end opens it (an NCCL communicator is made by its
        first operation), so all ranks open theirs in one common order: both ends of the
        lowest-numbered unopened channel are waiting on it, so this cannot deadlock. Pairs with an
        even lower rank come first, so that neighbors of a chain do not wait in turn.
        """
        links = []
        for pair in sorted(pairs, key=lambda pair: (min(pair) % 2, min(pair), max(pair), pair)):
            source, destination = pair
            ends, peer = (self.outward, destination) if rank == source else (self.inward, source)
            if rank not in pair or peer in ends:
                continue
            end = SOURCE if rank == source else DESTINATION
            place = dist.PrefixStore(f"{source}>{destination}", store)
            arguments = place, end, patience(backend, timeout)
            ends[peer] = (
                nccl_link(*arguments, pair) if backend == gpu.BACKEND else gloo_link(*arguments)
            )
            move = ends[peer].send if rank == source else ends[peer].recv
            # the first message makes the connection
            move([torch.zeros(1, device=device)], 1 - end, 0).wait()
            links.append(ends[peer])
        return links

    def close(self, backend: str, broken: bool) -> None:
        """Closes the connections. gloo's close with their groups; if a step was `broken` off,
        NCCL's kernels that wait for a message that never comes are ended."""
        for link in (*self.outward.values(), *self.inward.values()):
            if backend == gpu.BACKEND:
                (link.abort if broken else link.shutdown)()


Channels = TaggedLinks | OrderedLinks


Tensors = list[Tensor]
Send = tuple[Tensor, dist.Work]
# Sends of a channel and kind that may be incomplete: a rank runs ahead of its neighbour by few.
PENDING_SENDS = 4


@dataclass
class Transport:
    """Moves messages between stages. This base class serves one process, where a send puts the
    message into its box.

    `deliver` is for a stage on the same rank; `post` begins to receive tensors of these `specs`;
    `ready` says whether `wait` may be called, which returns once the message has arrived. What else
    brings messages, such as a collective, puts them into `boxes`, and functions that wait for them
    into `receives`.
    """

    boxes: dict[Message, Tensors] = field(default_factory=dict)
    receives: dict[Message, list[Callable[[], object]]] = field(default_factory=dict)

    def deliver(self, message: Message, tensors: Tensors) -> None:
        self.boxes[message] = tensors

    def send(self, message: Message, tensors: Tensors, peer: int) -> None:
        self.boxes[message] = tensors

    def post(self, message: Message, specs: Sequence[TensorSpec], peer: int) -> None:
        pass

    def ready(self, message: Message) -> bool:
        return message in self.boxes

    def wait(self, message: Message) -> None:
        if self.receives:
            for complete in self.receives.pop(message, ()):
                complete()

    def take(self, message: Message) -> Tensors:
        return self.boxes.pop(message)

    def finish(self) -> None:
        if self.boxes:
            raise PipelineError(f"the step ended with messages not taken: {sorted(self.boxes)}")


@dataclass(kw_only=True)
class PointToPoint(Transport):
    """Messages between processes, received into new memory on `device`.

    Nothing here blocks the host on CUDA: `wait` on an NCCL work makes the compute stream wait for
    an event of the channel's stream, and both ends of a message start when the compute stream
    reaches where they were posted. So the caching allocator may give a receive memory that earlier
    passes have freed.

    A tensor is kept until its send is complete, so that its memory is not reused while it is read.
    gloo reports completion only to a wait: a send blocks until the one `PENDING_SENDS` before it on
    its channel is complete. A lowered schedule cannot deadlock even if every send blocks.
    """

    channels: Channels
    device: torch.device
    sends: dict[tuple[int, str], deque[list[Send]]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def send(self, message: Message, tensors: Tensors, peer: int) -> None:
        pending = self.sends[peer, message.kind]
        while pending and (
            all(work.is_completed() for _, work in pending[0])
            if self.device.type != "cpu"
            else len(pending) >= PENDING_SENDS
        ):
            self._complete(pending)
        sends: list[Send] = []
        for index, tensor in enumerate(tensors):
            flat = as_contiguous(packed(tensor))
            sends.append((flat, self.channels.send(flat, message, index, peer)))
        pending.append(sends)

    def _complete(self, pending: deque[list[Send]]) -> None:
        for _, work in pending.popleft():
            work.wait()

    def post(self, message: Message, specs: Sequence[TensorSpec], peer: int) -> None:
        tensors = self.boxes[message] = [packed_buffer(spec, self.device) for spec in specs]
        self.receives[message] = [
            self.channels.receive(as_contiguous(tensor), message, index, peer).wait
            for index, tensor in enumerate(tensors)
        ]

    def ready(self, message: Message) -> bool:
        return True

    def finish(self) -> None:
        for pending in self.sends.values():
            while pending:
                self._complete(pending)
        super().finish()


# The tensors of messages: packed as they are sent, laid out with the strides of the graphs


def packed(tensor: Tensor) -> Tensor:
    """`tensor` without gaps and with each element once: the tensor itself if it is dense."""
    if tensor.is_contiguous() or is_dense(tensor):
        return tensor
    shape, strides = packed_layout(tensor.shape, tensor.stride())
    return _copied(tensor, shape, strides)


def packed_buffer(spec: TensorSpec, device: torch.device) -> Tensor:
    """Memory that a packed tensor of this specification can be received into."""
    shape, strides = packed_layout(spec.shape, spec.stride)
    return torch.empty_strided(shape, strides, dtype=dtype_named(spec.dtype), device=device)


def empty(spec: TensorSpec, device: torch.device) -> Tensor:
    """A contiguous, uninitialised tensor of this specification."""
    return torch.empty(spec.shape, dtype=dtype_named(spec.dtype), device=device)


def laid_out(value: Tensor, spec: TensorSpec) -> Tensor:
    """`value`, packed or not, with the strides that the graph was traced for; a copy only if they
    differ."""
    if value.shape == spec.shape and (
        value.stride() == spec.stride
        # those of dimensions of size 1 mean nothing
        or all(
            a == b or size == 1
            for a, b, size in zip(value.stride(), spec.stride, value.shape, strict=True)
        )
    ):
        return value
    once, _ = packed_layout(spec.shape, spec.stride)
    return _copied(value, once, spec.stride).expand(spec.shape)


def as_contiguous(tensor: Tensor) -> Tensor:
    """A contiguous view of a dense tensor's memory, dimensions in order of strides: backends send
    nothing else."""
    if tensor.is_contiguous():
        return tensor
    strides = [(tensor.stride(i), tensor.shape[i], i) for i in range(tensor.ndim)]
    return tensor.permute([i for *_, i in sorted(strides, key=lambda s: s[:2], reverse=True)])


def _copied(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A copy of the first elements of each dimension."""
    first = tensor[tuple(slice(size) for size in shape)]
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(
        first
    )
