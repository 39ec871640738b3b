"""The storage of a checkpoint for torch.distributed.checkpoint: that package plans what each process writes and reads,
across any change of ranks; the bytes are safetensors and JSON.

Importing this takes a second, for that package.
"""

import hashlib
import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zbcompile.errors import PipelineError
from zbcompile.persistence.checkpoint_record import Chunk, Record, StoredChunk, StoredTensor, bytes_of, read_record
from zbcompile.persistence.plain_values import from_data
from zbcompile.safe_files import regular_file


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class _PlansAsMade:
    """What both ends leave as torch's planners made it."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class StagingWriter(_PlansAsMade, StorageWriter):
    """Collects in `chunks` what this process must write; with `copy`, as it is now."""

    def __init__(self, copy: bool) -> None:
        self.copy = copy
        self.chunks: list[Chunk] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        self.chunks = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        self.chunks = [self._staged(item, planner) for item in plan.items]
        return _done([])  # type: ignore[no-any-return]

    def _staged(self, item: WriteItem, planner: SavePlanner) -> Chunk:
        values, data = planner.resolve_data(item), item.tensor_data
        assert isinstance(values, torch.Tensor)
        assert data is not None
        values = values.detach()
        dense = values.cpu().contiguous()
        if self.copy and dense.data_ptr() == values.data_ptr():
            dense = dense.clone()
        return Chunk(item.index.fqn, tuple(data.size), tuple(data.chunk.offsets), dense)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass


class CheckpointReader(_PlansAsMade, StorageReader):
    """Reads a checkpoint of this project through `torch.distributed.checkpoint.load(..., storage_reader=)`.

    Every tensor that is read is compared with its checksum.

    >>> dcp.load(state, storage_reader=CheckpointReader("checkpoints/step-00000020"))       # doctest: +SKIP
    """

    def __init__(self, path: str | Path, record: Record | None = None) -> None:
        self.record = record or read_record(Path(path))

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        found: dict[str, Any] = {name: _described(tensor) for name, tensor in self.record.tensors.items()}
        return Metadata(found | {key: BytesStorageMetadata() for key in self.record.fields["values"]})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # type: ignore[override]
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._value(item.storage_index.fqn))
            else:
                target = planner.resolve_tensor(item).detach()
                target.copy_(self._part(item))
                planner.commit_tensor(item, target)
        return _done(None)  # type: ignore[no-any-return]

    def _value(self, key: str) -> io.BytesIO:
        """A value in the form that torch's planners take, a pickle; it is made here, of JSON."""
        buffer = io.BytesIO()
        torch.save(from_data(self.record.fields["values"][key], {}), buffer)
        buffer.seek(0)
        return buffer

    def _part(self, item: ReadItem) -> torch.Tensor:
        stored, offset = self.record.tensors[item.storage_index.fqn], item.storage_index.offset
        chunk = next(each for each in stored.chunks if offset is None or each.offset == tuple(offset))
        values = self._read(item.storage_index.fqn, chunk, stored.dtype)
        begins = zip(item.storage_offsets, item.lengths, strict=True)
        return values[tuple(slice(begin, begin + length) for begin, length in begins)]

    def _read(self, name: str, chunk: StoredChunk, dtype: torch.dtype) -> torch.Tensor:
        path, size = self.record.path / chunk.file, self.record.files[chunk.file][0]
        content = bytearray(bytes_of(chunk, dtype))
        with regular_file(path, size) as file:
            file.seek(chunk.begin)
            file.readinto(content)  # type: ignore[attr-defined]
        if hashlib.sha256(content).hexdigest() != chunk.sha256:
            raise PipelineError(f"{path} was changed after it was written: the checksum of {name} differs.")
        values = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return values.reshape(chunk.shape)


def _described(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(each.offset), torch.Size(each.shape)) for each in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
