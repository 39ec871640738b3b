"""A rectangle of a tensor, in the form that torch.distributed.checkpoint writes and reads."""

from typing import Any

import torch

from zbcompile.model.distributed_tensors import is_distributed

Chunk = tuple[tuple[int, ...], tuple[int, ...]]  # the shape of a whole tensor, the offset of a part


class TensorShard(torch.Tensor):
    """A tensor that is sharded over processes: this one has the part `local` at `offset`.

    It has the shape of the full tensor and no memory except that of `local`. The methods with
    underscores are the protocol by which torch.distributed.checkpoint plans tensor subclasses.
    """

    local: torch.Tensor
    offset: tuple[int, ...]

    @classmethod
    def of(cls, local: torch.Tensor, chunk: Chunk) -> "TensorShard":
        shape, offset = chunk
        shard = torch.empty((), dtype=local.dtype, device="cpu").expand(shape).as_subclass(cls)
        shard.local, shard.offset = local, offset
        return shard

    def __deepcopy__(self, memo: Any) -> "TensorShard":
        return TensorShard.of(self.local.clone(), (tuple(self.shape), self.offset))

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(self.offset), self.local.shape)]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        (chunk,) = self.__create_chunk_list__()
        properties = TensorProperties.create_from_tensor(self.local)
        data = TensorWriteData(chunk, properties, torch.Size(self.shape))
        index = MetadataIndex(fqn, chunk.offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.local


def chunk_of(tensor: Any) -> Chunk | None:
    """Returns where this process's part of a DTensor is in the whole; None for a plain tensor."""
    if not is_distributed(tensor):
        return None
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(tensor.shape), tuple(chunk.offsets)


def local_of(tensor: Any) -> Any:
    """Returns the part of a TensorShard or DTensor in this process's memory; another value as it
    is."""
    if isinstance(tensor, TensorShard):
        return tensor.local
    return tensor.to_local() if is_distributed(tensor) else tensor


def shard_of(tensor: Any) -> Any:
    """Returns a DTensor's part as a TensorShard over the same memory, and any other value
    unchanged."""
    chunk = chunk_of(tensor)
    return tensor if chunk is None else TensorShard.of(local_of(tensor).detach(), chunk)
