"""The buffers of collectives: a large tensor is sent alone, from its memory; small ones are copied
into one buffer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from zbcompile.distributed.packing import as_contiguous

Key = TypeVar("Key")
Content = tuple[Key, torch.Tensor]

ALONE_BYTES = 1 << 20  # what is as large travels by itself: a copy would need as much memory again
# smaller tensors travel together up to this size, as in DistributedDataParallel
PARCEL_BYTES = 25 << 20


@dataclass
class Parcel(Generic[Key]):
    """Dense tensors of one dtype under way: `flat` is the memory of a single one, or a copy of
    several, or in another dtype."""

    contents: Sequence[Content[Key]]
    flat: torch.Tensor
    work: dist.Work | None

    def arrived(self) -> Iterator[Content[Key]]:
        """Wait for the exchange. Returns the result for each tensor, in the order of its memory."""
        if self.work is not None:
            self.work.wait()
        parts = self.flat.view(-1).split([tensor.numel() for _, tensor in self.contents])
        yield from zip((key for key, _ in self.contents), parts, strict=True)

    def unpack(self) -> None:
        """Wait for the exchange, and write its result into each tensor."""
        for (_, tensor), (_, part) in zip(self.contents, self.arrived(), strict=True):
            if tensor.data_ptr() != part.data_ptr():
                target = as_contiguous(tensor)
                target.copy_(part.view(target.shape))


def send(
    tensors: Iterable[Content[Key]],
    begin: Callable[[torch.Tensor], dist.Work | None],
    dtype: torch.dtype | None = None,
) -> list[Parcel[Key]]:
    """Begin the collective `begin` on these tensors, which have equal sizes on all of its ranks;
    real ones are sent in `dtype`, if it is given."""
    return [_sent(contents, begin, dtype) for contents in _divided(tensors)]


def _divided(tensors: Iterable[Content[Key]]) -> Iterator[list[Content[Key]]]:
    small: dict[torch.dtype, list[Content[Key]]] = {}
    for key, tensor in tensors:
        if tensor.nbytes >= ALONE_BYTES:
            yield [(key, tensor)]
            continue
        together = small.setdefault(tensor.dtype, [])
        together.append((key, tensor))
        if sum(member.nbytes for _, member in together) >= PARCEL_BYTES:
            yield small.pop(tensor.dtype)
    yield from small.values()


def _sent(
    contents: Sequence[Content[Key]],
    begin: Callable[[torch.Tensor], dist.Work | None],
    dtype: torch.dtype | None,
) -> Parcel[Key]:
    views = [as_contiguous(tensor) for _, tensor in contents]
    alone = len(views) == 1 and views[0].is_contiguous()
    flat = views[0] if alone else torch.cat([view.reshape(-1) for view in views])
    if dtype is not None and not flat.is_complex():
        flat = flat.to(dtype)
    return Parcel(contents, flat, begin(flat))
