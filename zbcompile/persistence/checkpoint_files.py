"""The files of a checkpoint for torch.distributed.checkpoint: safetensors, and index.json, which is
written last.

`index.json` holds the values that are no tensors, for every tensor its chunks and their files, for
every file its size and SHA-256, and a digest of itself. torch's `HuggingFaceStorageReader` reads
the tensors of such a directory too. Importing this takes a second, for that package.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zbcompile.errors import PipelineError
from zbcompile.json_text import to_text
from zbcompile.model.tensor_shard import TensorShard, chunk_of, local_of
from zbcompile.passes.torch_names import NAMED, named
from zbcompile.persistence.checkpoint_directory import INDEX, OLD_INDEX, publish
from zbcompile.persistence.safetensors_files import header_digest, write_safetensors
from zbcompile.safe_files import cannot_write, sha256_of, write_whole
from zbcompile.untrusted_text import read_text

FORMAT, VERSION = "zbcompile checkpoint", 4
Values = dict[str, Any]


class StoredTensor(NamedTuple):
    """The dtype and shape of a tensor, and its chunks: file, offset and shape of each."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[tuple[str, list[int], list[int]]]


@dataclass(frozen=True)
class CheckpointIndex:
    """The contents of a checkpoint's index.json: `fields` of it, and its tensors by name."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def section(self, name: str) -> dict[str, Any]:
        """Returns the entries of "model" or "optimizer" by name: a StoredTensor, or None for any
        other value."""
        every = {**self.tensors, **dict.fromkeys(self.fields["values"])}
        return {
            key.removeprefix(f"{name}."): value
            for key, value in every.items()
            if key.startswith(f"{name}.")
        }


class CheckpointWriter(FileSystemWriter):
    """Writes this process's tensors into one file of the staging directory `path`.

    The first process gets what every process contributes to the index, `contribution` and the
    chunks of its tensors, writes the index with the further `fields`, and gives the directory its
    name. `working` is entered around all work that waits for no other rank.
    """

    def __init__(
        self,
        path: Path,
        number: int,
        contribution: Mapping[str, Any],
        fields: Mapping[str, Any],
        keep: int | None,
        working: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(path)
        self.file = path / f"part-{number:05d}.safetensors"
        self.contribution, self.fields, self.keep, self.working = (
            contribution,
            fields,
            keep,
            working,
        )

    def stage(self, state_dict: Values) -> Values:
        """Returns a copy on the CPU, for a save that goes on while training changes the tensors."""
        return {name: _copy(tensor) for name, tensor in state_dict.items()}

    def write_data(self, plan: Any, planner: Any) -> "Future[list[WriteResult]]":
        tensors, entries = dict[str, torch.Tensor](), Values()
        with self.working():
            for item in plan.items:
                name, data, values = item.index.fqn, item.tensor_data, planner.resolve_data(item)
                tensors[name] = values.detach().cpu().contiguous()
                dtype = str(values.dtype).removeprefix("torch.")
                chunk = [self.file.name, list(data.chunk.offsets), list(data.chunk.sizes)]
                entries[name] = {"dtype": dtype, "shape": list(data.size), "chunks": [chunk]}
            offsets = {
                name: {"saved_offsets": entry["chunks"][0][1]} for name, entry in entries.items()
            }
            # as torch's writer has it
            metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
            try:
                written = write_safetensors(self.file, tensors, metadata)
            except OSError as error:
                raise cannot_write(self.file, error) from None
        contribution = {**self.contribution, "tensors": entries, "files": {self.file.name: written}}
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), 0, contribution)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        partial = self.file.parent
        with self.working():
            try:
                text = index_text(self.fields, [result.storage_data for (result,) in results])
                write_whole(partial / INDEX, text.encode())
                publish(partial, self.keep)
            except OSError as error:
                raise cannot_write(partial, error) from None


class CheckpointReader(FileSystemReader):
    """Reads the tensors of a checkpoint whose index was read."""

    def __init__(self, index: CheckpointIndex) -> None:
        super().__init__(str(index.path))
        self.index = index

    def read_metadata(self) -> Metadata:
        tensors, files = Values(), {}
        for name, stored in self.index.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
                for _, offset, shape in stored.chunks
            ]
            tensors[name] = TensorStorageMetadata(
                TensorProperties(stored.dtype), torch.Size(stored.shape), chunks
            )
            for (file, *_), chunk in zip(stored.chunks, chunks, strict=True):
                files[MetadataIndex(name, chunk.offsets)] = self.index.path / file
        return Metadata(tensors, storage_data=files)

    def read_data(self, plan: Any, planner: Any) -> "Future[None]":
        paths = {item.storage_index: self.storage_data[item.storage_index] for item in plan.items}
        opened = {path: safe_open(path, "pt") for path in set(paths.values())}
        for item in plan.items:
            stored = opened[paths[item.storage_index]].get_slice(item.storage_index.fqn)
            ends = zip(item.storage_offsets, item.lengths, strict=True)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored[tuple(slice(begin, begin + length) for begin, length in ends)])
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _copy(tensor: Any) -> torch.Tensor:
    chunk = (
        (tuple(tensor.shape), tensor.offset)
        if isinstance(tensor, TensorShard)
        else chunk_of(tensor)
    )
    local = local_of(tensor).detach()
    copy = torch.empty(local.shape, dtype=local.dtype, device="cpu").copy_(local)
    return copy if chunk is None else TensorShard.of(copy, chunk)


def index_text(fields: Mapping[str, Any], parts: Iterable[Mapping[str, Any]]) -> str:
    """Returns the text of index.json: `fields`, what every process contributes, and the digest of
    all of it."""
    data: Values = {
        "format": FORMAT,
        "version": VERSION,
        **fields,
        "optimizer": None,
        "left_out": [],
    }
    tensors, files, values = Values(), Values(), Values()
    for part in parts:
        data["optimizer"] = data["optimizer"] or part["optimizer"]
        data["left_out"] = sorted({*data["left_out"], *part["left_out"]})
        values |= part["values"]
        files |= part["files"]
        for name, entry in part["tensors"].items():
            tensors.setdefault(name, {**entry, "chunks": []})["chunks"] += entry["chunks"]
    return _with_digest(
        {**data, "files": files, "values": values, "tensors": dict(sorted(tensors.items()))}
    )


def _with_digest(data: Values) -> str:
    return to_text({**data, "digest": hashlib.sha256(to_text(data, 2).encode()).hexdigest()}, 2)


def read_index(path: Path) -> CheckpointIndex:
    """Returns the index of a checkpoint. Raises PipelineError if it is damaged, or a file is
    missing or of another size."""
    where = path / INDEX
    if (path / OLD_INDEX).exists():
        raise PipelineError(f"{path} is of an older release, whose format is not read.")
    if not where.exists():
        raise PipelineError(
            f"{path} has no {INDEX}: it is no checkpoint, or one with pickles, which are never"
            " read."
        )
    try:
        text = read_text(where, PipelineError)
        data = json.loads(text)
        del data["digest"]
        if _with_digest(data) != text or (data["format"], data["version"]) != (FORMAT, VERSION):
            raise ValueError(f"its digest differs, or it is not format {VERSION}")
        for file, written in data["files"].items():
            if (path / file).stat().st_size != written["bytes"]:
                raise ValueError(f"{file} has another size")
        if not isinstance(data["step"], int) or data["step"] < 0:
            raise ValueError(f"step is {data['step']!r:.80}")
        tensors = {name: _stored(entry, data["files"]) for name, entry in data["tensors"].items()}
    except Exception as error:
        problem = (
            str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        )
        problem = problem.partition("\n")[0][:200]
        raise PipelineError(f"{where} is damaged ({problem}). Load another checkpoint.") from None
    return CheckpointIndex(path, data, tensors)


def require_headers(index: CheckpointIndex, share: int = 0, shares: int = 1) -> None:
    """Raises PipelineError if the header of a file was changed. Of several processes each reads a
    share of them."""
    for file, written in sorted(index.fields["files"].items())[share::shares]:
        if header_digest(index.path / file) != written["header"]:
            raise PipelineError(
                f"{index.path / file} was changed after it was written: its header differs."
            )


def _stored(entry: Values, files: Mapping[str, Any]) -> StoredTensor:
    if (
        entry["dtype"] not in NAMED["dtype"]
        or not {file for file, *_ in entry["chunks"]} <= files.keys()
    ):
        raise ValueError("a tensor has no dtype of torch, or no file")
    return StoredTensor(named("dtype", entry["dtype"]), tuple(entry["shape"]), entry["chunks"])


def require_unchanged(path: Path) -> None:
    """Raises PipelineError if a file of a checkpoint differs from its digest."""
    for file, written in read_index(path).fields["files"].items():
        if sha256_of(path / file) != written["sha256"]:
            raise PipelineError(
                f"{path / file} was changed after it was written: its SHA-256 differs."
            )
