"""The tensors that one process writes: a safetensors file, and a checksum of the file and of each tensor in it.

A part holds whole tensors, or rectangular chunks of tensors that are sharded over processes.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

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
        kind = _safetensors_dtype(chunk.values.dtype)
        shape = list(chunk.values.shape) if kind else [chunk.bytes.nbytes]
        entries[chunk.key] = {"dtype": kind or "U8", "shape": shape, "data_offsets": [begin, ends[-1]]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, ends


def _safetensors_dtype(dtype: torch.dtype) -> str | None:
    """The format's name of a dtype; None if it has none, such as complex128, whose bytes are written."""
    try:
        content = save({"x": torch.empty(0, dtype=dtype)})
    except KeyError:
        return None
    return str(json.loads(content[8:])["x"]["dtype"])
