"""checkpoint.json, the record that makes a directory a checkpoint: what is in it, where, and with which checksums.

It is written last. docs/running.md lists its fields.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zbcompile.errors import PipelineError
from zbcompile.json_text import to_text
from zbcompile.passes.serialization.arguments import named
from zbcompile.persistence.checkpoint_directory import INDEX, PICKLED
from zbcompile.program.manifest import digest_of
from zbcompile.safe_files import read_regular, sha256_of

FORMAT, VERSION = "zbcompile checkpoint", 2
Fields = dict[str, Any]


class StoredChunk(NamedTuple):
    """Where a chunk of a tensor is: `offset` and `shape` in the tensor; file, first byte and SHA-256 of its bytes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    sha256: str


class StoredTensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class Record:
    """A record that was read and checked. `fields` are all its fields; `files` has bytes and SHA-256 by name."""

    path: Path
    fields: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]
    tensors: Mapping[str, StoredTensor]


def record_to_text(fields: Mapping[str, Any], parts: Iterable[Mapping[str, Any]]) -> str:
    """The record of a checkpoint whose processes wrote `parts`. It contains its own digest."""
    files: Fields = {}
    tensors: Fields = {}
    for part in parts:
        files |= part["files"]
        for name, entry in part["tensors"].items():
            tensors.setdefault(name, {**entry, "chunks": []})["chunks"] += entry["chunks"]
    data = {"format": FORMAT, "version": VERSION, **fields, "files": files, "tensors": dict(sorted(tensors.items()))}
    return to_text({**data, "digest": digest_of(data)}, 2)


def read_record(path: Path) -> Record:
    """The record of a checkpoint directory. Raises PipelineError if it is damaged, or of another format."""
    if is_pickled(path):
        raise PipelineError(
            f"{path} is of an older release, or written by torch.distributed.checkpoint itself: its pickles run code "
            "when they are read. If you trust it, pass load_checkpoint(..., trust=True) or --trust-checkpoint, or run "
            f"python -m zbcompile.checkpoints convert {path} NEW --trust."
        )
    try:
        text = read_regular(path / INDEX).decode()
        data = json.loads(text)
        _require((data["format"], data["version"]) == (FORMAT, VERSION), f"its format is not {FORMAT!r}, {VERSION}")
        _require(data["digest"] == digest_of({k: v for k, v in data.items() if k != "digest"}), "its digest differs")
        _require(to_text(data, 2) == text, "its text is not what was written")
        return _checked(path, data)
    except PipelineError:
        raise
    except Exception as error:  # of bytes that anyone may have written
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise PipelineError(f"{path / INDEX} is damaged ({problem}). Load another checkpoint.") from None


def is_pickled(path: Path) -> bool:
    """Whether a directory holds a checkpoint as torch.distributed.checkpoint writes it, with pickles in it."""
    return (path / PICKLED).exists()


def require_whole(record: Record, share: int = 0, shares: int = 1) -> None:
    """Raise PipelineError if a file is missing or was changed. Of several processes each checks its share."""
    for name, (size, sha256) in list(record.files.items())[share::shares]:
        if sha256_of(record.path / name, size) != sha256:
            raise PipelineError(f"{record.path / name} was changed after it was written: its checksum differs.")


def _checked(path: Path, data: Fields) -> Record:
    files = {name: (_size(size), str(sha256)) for name, (size, sha256) in data["files"].items()}
    for name in files:
        _require(Path(name).name == name and not name.startswith("."), f"{name!r} is not one of its files")
    tensors = {name: _tensor(name, entry, files) for name, entry in data["tensors"].items()}
    return Record(path, data, files, tensors)


def _tensor(name: str, entry: Fields, files: Mapping[str, tuple[int, str]]) -> StoredTensor:
    dtype, shape = named("dtype", entry["dtype"]), tuple(map(_size, entry["shape"]))
    chunks = tuple(StoredChunk(tuple(o), tuple(s), file, b, sha256) for o, s, file, b, sha256 in entry["chunks"])
    for chunk in chunks:
        placed = zip(chunk.offset, chunk.shape, shape, strict=True)
        _require(all(_size(o) + _size(s) <= of for o, s, of in placed), f"{name} has a chunk outside of it")
        _require(_size(chunk.begin) + bytes_of(chunk, dtype) <= files[chunk.file][0], f"{name} is outside of its file")
    covered = sum(math.prod(chunk.shape) for chunk in chunks)
    distinct = len({chunk.offset for chunk in chunks}) == len(chunks)
    _require(distinct and covered == math.prod(shape), f"the chunks of {name} do not cover it")
    return StoredTensor(dtype, shape, chunks)


def bytes_of(chunk: StoredChunk, dtype: torch.dtype) -> int:
    """The bytes of a chunk in its file."""
    return math.prod(chunk.shape) * dtype.itemsize


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


def _require(true: bool, problem: str) -> None:
    if not true:
        raise ValueError(problem)
