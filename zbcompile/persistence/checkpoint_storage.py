"""The storage of a checkpoint for torch.distributed.checkpoint: that package plans what each process writes and reads,
across any change of ranks, and exchanges the results; the bytes are safetensors and JSON.

Importing this takes a second, for that package.
"""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zbcompile.persistence.checkpoint_values import from_data
from zbcompile.persistence.local_tensors import Pieces
from zbcompile.persistence.safetensors_files import bytes_of, write_safetensors
from zbcompile.persistence.saved_state import SavedState, StoredTensor, key_of, open_state
from zbcompile.safe_files import cannot_write

Contribution = Mapping[str, Any]  # what one process adds to the record of a checkpoint


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class _UnchangedPlans:
    """The common part of reader and writer: plans stay as torch's planners made them."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class CheckpointWriter(_UnchangedPlans, StorageWriter, AsyncStager):
    """Writes this process's tensors to the file `path`. The first process is then given what all of them contribute, by
    `commit`: `own` and where their tensors are. `working` is entered around both: nothing inside waits for other
    ranks."""

    _synchronize_after_execute = False

    def __init__(
        self,
        path: Path,
        own: Contribution,
        commit: Callable[[Sequence[Contribution]], object],
        working: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.path, self.own, self.commit, self.working = path, own, commit, working

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy on the CPU, which training does not change."""
        return {name: Pieces.copied(value) for name, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        with self.working():
            content: dict[str, torch.Tensor] = {}
            entries: dict[str, Any] = {}
            for item in plan.items:
                values, data = planner.resolve_data(item), item.tensor_data
                assert isinstance(values, torch.Tensor)
                assert data is not None
                name, offset, shape = item.index.fqn, list(data.chunk.offsets), list(data.chunk.sizes)
                dense = values.detach().cpu().contiguous()
                content[key_of(name, offset, shape, data.size)] = dense
                dtype = str(values.dtype).removeprefix("torch.")
                entry = entries.setdefault(name, {"dtype": dtype, "shape": list(data.size), "chunks": []})
                digest = hashlib.sha256(bytes_of(dense)).hexdigest()
                entry["chunks"].append([offset, shape, self.path.name, digest])
            try:
                write_safetensors(self.path, content)
            except OSError as error:
                raise cannot_write(self.path, error) from None
        return _done([WriteResult(MetadataIndex(""), 0, {**self.own, "tensors": entries})])  # type: ignore[no-any-return]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self.working():
            self.commit([each.storage_data for (each,) in results])


class CheckpointReader(_UnchangedPlans, StorageReader):
    """Reads a checkpoint of this project through `torch.distributed.checkpoint.load(..., storage_reader=)`.

    Every tensor that is read is compared with its checksum.

    >>> dcp.load(state, storage_reader=CheckpointReader("checkpoints/step-00000020"))       # doctest: +SKIP
    """

    def __init__(self, path: str | Path, saved: SavedState | None = None) -> None:
        self.saved = saved or open_state(Path(path))

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        found: dict[str, Any] = {name: _described(tensor) for name, tensor in self.saved.tensors.items()}
        return Metadata(found | {key: BytesStorageMetadata() for key in self.saved.fields["values"]})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # type: ignore[override]
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._pickled(item.storage_index.fqn))
            else:
                target = planner.resolve_tensor(item).detach()
                target.copy_(self._part(item))
                planner.commit_tensor(item, target)
        return _done(None)  # type: ignore[no-any-return]

    def _pickled(self, key: str) -> io.BytesIO:
        """A value in the form that torch's planners take; it is made here, of JSON."""
        buffer = io.BytesIO()
        torch.save(from_data(self.saved.fields["values"][key], {}), buffer)
        buffer.seek(0)
        return buffer

    def _part(self, item: ReadItem) -> torch.Tensor:
        name, offset = item.storage_index.fqn, item.storage_index.offset
        chunks = self.saved.tensors[name].chunks
        chunk = next(each for each in chunks if offset is None or each.offset == tuple(offset))
        begins = zip(item.storage_offsets, item.lengths, strict=True)
        return self.saved.chunk(name, chunk)[tuple(slice(begin, begin + length) for begin, length in begins)]


def _described(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(each.offset), torch.Size(each.shape)) for each in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
