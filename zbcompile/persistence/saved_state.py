"""A checkpoint on disk: checkpoint.json, the record of what is in it and where, written last; and the tensors that it
describes, in a safetensors file of each process, whole ones or rectangular chunks of those that several processes hold.

docs/running.md lists the fields of the record.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from zbcompile.errors import PipelineError
from zbcompile.json_text import to_text
from zbcompile.passes.torch_names import NAMED, named
from zbcompile.persistence.checkpoint_directory import INDEX
from zbcompile.persistence.safetensors_files import bytes_of, open_safetensors
from zbcompile.program.manifest import digest_of
from zbcompile.untrusted_text import read_json

FORMAT, VERSION = "zbcompile checkpoint", 3
CUT = 6  # dimensions along which a tensor can be cut: the corners of each chunk are 2 to that power
NAME = 255  # characters of a file name, the most that file systems allow
Values = dict[str, Any]


class StoredChunk(NamedTuple):
    """Where a chunk of a tensor is: `offset` and `shape` in the tensor, the file, and the SHA-256 of its bytes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    sha256: str


class StoredTensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


def key_of(name: str, offset: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> str:
    """A chunk's name in its file: the tensor's own, with the offset if it is not all of it."""
    return name if tuple(shape) == tuple(whole) else f"{name}@{','.join(map(str, offset))}"


@dataclass(frozen=True)
class SavedState:
    """A checkpoint whose record was read and checked: its `fields`, and where the `tensors` are. Values that are no
    tensors are in the field `values`. Both have names such as "model.NAME", of a section and a key."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    opened: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def files(self) -> list[str]:
        return sorted({chunk.file for tensor in self.tensors.values() for chunk in tensor.chunks})

    @property
    def bytes(self) -> int:
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors.values())

    def keys(self, section: str) -> dict[str, StoredTensor | None]:
        """The entries of one section by key: the description of a tensor, or None for any other value."""
        start = f"{section}."
        every = {**self.tensors, **dict.fromkeys(self.fields["values"])}
        return {name.removeprefix(start): each for name, each in every.items() if name.startswith(start)}

    def chunk(self, name: str, chunk: StoredChunk) -> torch.Tensor:
        """The content of a chunk. Raises PipelineError if it is not what was written."""
        tensor, path = self.tensors[name], self.path / chunk.file
        try:
            if chunk.file not in self.opened:
                self.opened[chunk.file] = open_safetensors(path)
            found = self.opened[chunk.file].get_tensor(key_of(name, chunk.offset, chunk.shape, tensor.shape))
        except (OSError, SafetensorError) as error:
            raise PipelineError(f"{path} cannot be read: {error!s:.300}. Load another checkpoint.") from None
        size = math.prod(chunk.shape) * tensor.dtype.itemsize
        if found.nbytes != size or hashlib.sha256(bytes_of(found)).hexdigest() != chunk.sha256:
            raise PipelineError(f"{path} was changed after it was written: the checksum of {name} differs.")
        if found.dtype != tensor.dtype:  # one that safetensors does not know, stored as bytes
            found = found.clone().view(tensor.dtype)
        return found.reshape(chunk.shape)

    def require_whole(self, share: int = 0, shares: int = 1) -> None:
        """Raise PipelineError if a file is missing or was changed. Of several processes each checks its share."""
        own = self.files[share::shares]
        for name, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                if chunk.file in own:
                    self.chunk(name, chunk)


def record_to_text(fields: Mapping[str, Any], parts: Iterable[Mapping[str, Any]]) -> str:
    """The record of a checkpoint: `fields`, and what each process contributes. It contains its own digest."""
    data: Values = {"format": FORMAT, "version": VERSION, **fields, "optimizer": None, "left_out": [], "values": {}}
    tensors: Values = {}
    for part in parts:
        data["optimizer"] = data["optimizer"] or part["optimizer"]
        data["left_out"] = sorted({*data["left_out"], *part["left_out"]})
        data["values"] |= part["values"]
        for name, entry in part["tensors"].items():
            tensors.setdefault(name, {**entry, "chunks": []})["chunks"] += entry["chunks"]
    data["tensors"] = dict(sorted(tensors.items()))
    return to_text({**data, "digest": digest_of(data)}, 2)


def open_state(path: Path) -> SavedState:
    """The checkpoint in a directory. Raises PipelineError if its record is damaged, or of another format."""
    if not (path / INDEX).exists():
        raise PipelineError(f"{path} has no {INDEX}: it is no checkpoint, or one with pickles, which are never read.")
    where = path / INDEX
    try:
        data = read_json(where, PipelineError)
        if data["format"] == FORMAT and data["version"] in range(VERSION):
            raise PipelineError(f"{path} is of an older release (format {data['version']}), which is not read.")
        _require((data["format"], data["version"]) == (FORMAT, VERSION), f"its format is not {FORMAT!r}, {VERSION}")
        _require(data["digest"] == digest_of({k: v for k, v in data.items() if k != "digest"}), "its digest differs")
        return _checked(path, data)
    except PipelineError:
        raise
    except Exception as error:  # of bytes that anyone may have written
        problem = f"{type(error).__name__}: {error!s:.200}".partition("\n")[0]
        raise PipelineError(f"{where} is damaged ({problem}). Load another checkpoint.") from None


def _checked(path: Path, data: Values) -> SavedState:
    _size(data["step"])
    _require(isinstance(data["optimizer"], str | None), "its optimizer is no name")
    _require(all(type(data[name]) is dict for name in ("values", "tensors")), "a table is missing")
    left_out = data["left_out"]
    _require(type(left_out) is list and all(type(each) is str for each in left_out), "`left_out` is no list of names")
    return SavedState(path, data, {name: _tensor(name, entry) for name, entry in data["tensors"].items()})


def _tensor(name: str, entry: Values) -> StoredTensor:
    known = isinstance(entry["dtype"], str) and entry["dtype"] in NAMED["dtype"]
    _require(known, f"{name} has no dtype of torch")
    dtype, shape = named("dtype", entry["dtype"]), tuple(map(_size, entry["shape"]))
    chunks = tuple(StoredChunk(tuple(o), tuple(s), file, sha256) for o, s, file, sha256 in entry["chunks"])
    for chunk in chunks:
        placed = zip(chunk.offset, chunk.shape, shape, strict=True)
        _require(all(_size(o) + _size(s) <= of for o, s, of in placed), f"{name} has a chunk outside of it")
        known = Path(chunk.file).name == chunk.file and not chunk.file.startswith(".") and len(chunk.file) <= NAME
        _require(known, f"{chunk.file!r:.80} is not one of its files")
    _require(covers(chunks, shape), f"the chunks of {name} do not cover it, each element once")
    return StoredTensor(dtype, shape, chunks)


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


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is not a size")
    return value


def _require(true: bool, problem: str) -> None:
    if not true:
        raise ValueError(problem)
