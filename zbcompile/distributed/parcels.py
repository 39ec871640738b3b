"""What travels in collectives: a large tensor by itself, in its own memory, small ones together in a copy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future

from zbcompile.distributed.packing import as_contiguous
from zbcompile.errors import PipelineError

Key = TypeVar("Key")
Content = tuple[Key, torch.Tensor]
Add = Callable[[torch.Tensor], "Future[torch.Tensor]"]
# how tensors travel: in a dtype, or as a function makes of a row of elements, and of the collective, what becomes of it
Travel = torch.dtype | Callable[[torch.Tensor, Add], "Future[torch.Tensor]"] | None

ALONE_BYTES = 1 << 20  # what is as large travels by itself: a copy would need as much memory again
PARCEL_BYTES = 25 << 20  # smaller tensors travel together up to this size, as in DistributedDataParallel


@dataclass
class Parcel(Generic[Key]):
    """Dense tensors of one dtype under way: `flat` is the memory of a single one, or a copy of several, or in another
    dtype. `result` is what becomes of it, None: the same memory."""

    contents: Sequence[Content[Key]]
    flat: torch.Tensor
    work: dist.Work | None
    result: "Future[torch.Tensor] | None" = None

    def arrived(self) -> Iterator[Content[Key]]:
        """Wait for the exchange. Returns the result for each tensor, in the order of its memory."""
        if self.work is not None:
            self.work.wait()
        flat = self.flat if self.result is None else _awaited(self.result, self.flat)
        parts = flat.view(-1).split([tensor.numel() for _, tensor in self.contents])
        yield from zip((key for key, _ in self.contents), parts, strict=True)

    def unpack(self) -> None:
        """Wait for the exchange, and write its result into each tensor."""
        for (_, tensor), (_, part) in zip(self.contents, self.arrived(), strict=True):
            if tensor.data_ptr() != part.data_ptr():
                target = as_contiguous(tensor)
                target.copy_(part.view(target.shape))


def send(
    tensors: Iterable[Content[Key]], begin: Callable[[torch.Tensor], dist.Work | None], travel: Travel = None
) -> list[Parcel[Key]]:
    """Begin the collective `begin` on these tensors, which have equal sizes on all of its ranks; real ones `travel` in
    a dtype, or as a function says."""
    return [_sent(contents, begin, travel) for contents in _divided(tensors)]


def _divided(tensors: Iterable[Content[Key]]) -> Iterator[list[Content[Key]]]:
    small: dict[torch.dtype, list[Content[Key]]] = {}
    for key, tensor in tensors:
        if tensor.nbytes >= ALONE_BYTES:
            yield [(key, tensor)]
            continue
        together = small.setdefault(tensor.dtype, [])
        together.append((key, tensor))
        if sum(each.nbytes for _, each in together) >= PARCEL_BYTES:
            yield small.pop(tensor.dtype)
    yield from small.values()


def _sent(
    contents: Sequence[Content[Key]], begin: Callable[[torch.Tensor], dist.Work | None], travel: Travel
) -> Parcel[Key]:
    views = [as_contiguous(tensor) for _, tensor in contents]
    alone = len(views) == 1 and views[0].is_contiguous()
    flat = views[0] if alone else torch.cat([view.reshape(-1) for view in views])
    if travel is None or flat.is_complex():
        return Parcel(contents, flat, begin(flat))
    if isinstance(travel, torch.dtype):
        flat = flat.to(travel)
        return Parcel(contents, flat, begin(flat))
    flat = flat.view(-1)
    return Parcel(contents, flat, None, travel(flat, lambda tensor: _future(tensor, begin(tensor))))


def _future(tensor: torch.Tensor, work: dist.Work | None) -> "Future[torch.Tensor]":
    """A future of a tensor that a collective works on in place."""
    if work is None:
        found: Future[torch.Tensor] = Future()
        found.set_result(tensor)
        return found
    return work.get_future().then(lambda _: tensor)


def _awaited(result: object, flat: torch.Tensor) -> torch.Tensor:
    found = result.wait() if hasattr(result, "wait") else result
    if isinstance(found, torch.Tensor) and found.numel() == flat.numel():
        return found
    what = f"a tensor of {found.numel()} elements" if isinstance(found, torch.Tensor) else type(found).__name__
    raise PipelineError(
        f"the function that was passed as reduce_dtype= gave {what} for {flat.numel()} elements of gradients; expected "
        "a Future of a tensor of as many elements, such as add(gradients) returns."
    )
