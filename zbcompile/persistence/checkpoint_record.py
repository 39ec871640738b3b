"""The files of a checkpoint: the tensors of each process in a safetensors file, whole ones or rectangular chunks of
those that are sharded over processes; and checkpoint.json, the record that makes a directory a checkpoint: what is in
it, where, and with which checksums.

The record is written last. docs/running.md lists its fields.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from zbcompile.errors import PipelineError
from zbcompile.json_text import to_text
from zbcompile.passes.serialization.arguments import named
from zbcompile.persistence.checkpoint_directory import INDEX, PICKLED
from zbcompile.program.manifest import digest_of
from zbcompile.safe_files import sha256_of
from zbcompile.untrusted_text import LONG_TEXT, MORE_VALUES, parse_json, read_text

FORMAT, VERSION = "zbcompile checkpoint", 2
CUT = 6  # dimensions along which a tensor can be cut: the corners of each chunk are 2 to that power
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
        text = read_text(path / INDEX, PipelineError, LONG_TEXT)
        data = parse_json(text, PipelineError, f"{path / INDEX}: ", MORE_VALUES)
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
    _require_fields(data)
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
    _require(covers(chunks, shape), f"the chunks of {name} do not cover it, each element once")
    return StoredTensor(dtype, shape, chunks)


def _require_fields(data: Fields) -> None:
    _size(data["step"])
    _require(isinstance(data["optimizer"], str | None), "its optimizer is no name")
    _require(all(type(data[name]) is dict for name in ("values", "process", "files", "tensors")), "a table is missing")
    averaged = data.get("ema")
    if averaged is not None:
        _require(type(averaged["decay"]) in (int, float), "the decay of `ema` is no number")
        _size(averaged["updates"])
    left_out = data.get("left_out", [])
    _require(type(left_out) is list and all(type(each) is str for each in left_out), "`left_out` is no list of names")


def covers(chunks: Sequence[StoredChunk], shape: Sequence[int]) -> bool:
    """Whether every element is in exactly one chunk: then, and only then, the corners of the chunks cancel out but for
    those of the whole, counted with signs that alternate (the derivative along all dimensions of the sum of the chunks'
    indicator functions)."""
    pairs = [(tuple(zip(chunk.offset, chunk.shape, strict=True)), 1) for chunk in chunks]
    whole = tuple((0, size) for size in shape)
    cut = [place for place, span in enumerate(whole) if any(box[place] != span for box, _ in pairs)]
    _require(len(cut) <= CUT, f"its chunks are cut along more than {CUT} dimensions")
    corners: Counter[tuple[int, ...]] = Counter()
    for box, weight in (*pairs, (whole, -1)):
        ends = [((begin, 1), (begin + size, -1)) for begin, size in (box[place] for place in cut)]
        for corner in product(*ends):
            corners[tuple(at for at, _ in corner)] += weight * math.prod(sign for _, sign in corner)
    return not any(corners.values()) or not math.prod(shape)


def bytes_of(chunk: StoredChunk, dtype: torch.dtype) -> int:
    """The bytes of a chunk in its file."""
    return math.prod(chunk.shape) * dtype.itemsize


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is not a size")
    return value


def _require(true: bool, problem: str) -> None:
    if not true:
        raise ValueError(problem)


_ALIGNMENT = 8


@dataclass(frozen=True)
class Chunk:
    """A contiguous CPU tensor: what `shape`-shaped tensor `name` holds from `offset` on."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor

    @property
    def key(self) -> str:
        """Its name in the file: the tensor's own, with the offset if it is not all of it."""
        return self.name if self.values.shape == self.shape else f"{self.name}@{','.join(map(str, self.offset))}"

    @property
    def bytes(self) -> memoryview:
        return self.values.reshape(-1).view(torch.uint8).numpy().data


def write_part(path: Path, chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Write a safetensors file and fsync it. Returns its entries in the record of the checkpoint.

    Raises OSError.
    """
    ordered = sorted(chunks, key=lambda chunk: (-chunk.values.element_size(), chunk.key))  # keeps each one aligned
    header, ends = _header(ordered)
    whole = hashlib.sha256(header)
    tensors: dict[str, Any] = {}
    with path.open("wb") as file:
        file.write(header)
        for chunk, end in zip(ordered, ends, strict=True):
            file.write(chunk.bytes)
            whole.update(chunk.bytes)
            entry = tensors.setdefault(chunk.name, _described(chunk))
            digest = hashlib.sha256(chunk.bytes).hexdigest()
            begin = len(header) + end - chunk.bytes.nbytes
            entry["chunks"].append([list(chunk.offset), list(chunk.values.shape), path.name, begin, digest])
        file.flush()
        os.fsync(file.fileno())
    size = len(header) + (ends[-1] if ends else 0)
    return {"files": {path.name: [size, whole.hexdigest()]}, "tensors": tensors}


def _described(chunk: Chunk) -> dict[str, Any]:
    dtype = str(chunk.values.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(chunk.shape), "chunks": []}


def _header(chunks: Sequence[Chunk]) -> tuple[bytes, list[int]]:
    """The header of the file, and where each chunk ends behind it."""
    entries: dict[str, Any] = {}
    ends: list[int] = []
    for chunk in chunks:
        begin = ends[-1] if ends else 0
        ends.append(begin + chunk.bytes.nbytes)
        kind = safetensors_dtype(chunk.values.dtype)
        shape = list(chunk.values.shape) if kind else [chunk.bytes.nbytes]
        entries[chunk.key] = {"dtype": kind or "U8", "shape": shape, "data_offsets": [begin, ends[-1]]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, ends


def safetensors_dtype(dtype: torch.dtype) -> str | None:
    """The format's name of a dtype; None if it has none, such as complex128, whose bytes are written."""
    try:
        content = save({"x": torch.empty(0, dtype=dtype)})
    except KeyError:
        return None
    return str(json.loads(content[8:])["x"]["dtype"])
