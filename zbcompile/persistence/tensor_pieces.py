"""Parts of a tensor that begin and end anywhere in the order of its memory, as the rectangles in which
torch.distributed.checkpoint thinks."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from zbcompile.distributed.packing import memory_order

Corner = tuple[int, ...]


def rectangles(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[Corner, Corner]]:
    """Offset and size of the fewest boxes, one after the other, that hold the elements from `begin` to `end`.

    >>> list(rectangles((3, 4), 2, 12))
    [((0, 2), (1, 2)), ((1, 0), (2, 4))]
    """
    if not shape or begin == end:
        yield from [((), ())] if begin < end else []
        return
    inner = prod(shape[1:])
    row, after = begin // inner, begin % inner
    if after or end - begin < inner:
        stop = min(end, (row + 1) * inner)
        for offset, size in rectangles(shape[1:], after, stop - row * inner):
            yield (row, *offset), (1, *size)
        yield from rectangles(shape, stop, end)
        return
    rows = (end - begin) // inner
    yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from rectangles(shape, begin + rows * inner, end)


class Pieces(torch.Tensor):
    """A tensor of which this process has `parts`, by their offsets. Its size is that of the whole; it has no memory."""

    parts: Mapping[Corner, torch.Tensor]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offset), part.shape) for offset, part in self.parts.items()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        found = []
        for chunk, part in zip(self.__create_chunk_list__(), self.parts.values(), strict=True):
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.size())
            found.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return found

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.parts[tuple(index.offset)]


def pieces(
    shape: Sequence[int], offset: Sequence[int], local: torch.Tensor, begin: int, values: torch.Tensor
) -> Pieces:
    """What `values` are of a tensor of this shape: the elements from `begin` on of its part at `offset`, which is as
    large as `local` and laid out as it is."""
    order = memory_order(local)
    back = [order.index(i) for i in range(local.ndim)]
    parts, at = {}, 0
    for corner, size in rectangles([local.shape[i] for i in order], begin, begin + values.numel()):
        part = values[at : at + prod(size)].view(size).permute(back)
        parts[tuple(o + corner[i] for o, i in zip(offset, back, strict=True))] = part
        at += prod(size)
    made = torch.empty((), dtype=values.dtype).expand(tuple(shape)).as_subclass(Pieces)
    made.parts = parts
    return made
