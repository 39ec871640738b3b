"""Files in the safetensors format: written from the memory of the tensors, with their digests."""

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from zbcompile.errors import PipelineError


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] = {}
) -> Any:
    """Writes contiguous tensors of the CPU, and calls fsync. Returns the size and the SHA-256 of
    the file, and that of its header. Raises OSError, and PipelineError for a dtype that
    the format lacks.

    safetensors.torch.save refuses tensors that share memory, and copies all of them.
    """
    # keeps each one aligned
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, values in ordered:
        begin, end = end, end + values.nbytes
        kind = safetensors_dtype(values.dtype)
        if kind is None:
            raise PipelineError(
                f"{name} is {values.dtype}, which safetensors cannot hold. Convert it, or leave it"
                " out of the state dict (persistent=False)."
            )
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256(head := len(text).to_bytes(8, "little") + text)
    sizes = {"bytes": len(head) + end, "header": digest.hexdigest()}
    with ThreadPoolExecutor(1) as hashing, path.open("wb") as file:
        file.write(head)
        for _, values in ordered:
            content = bytes_of(values)
            hashing.submit(digest.update, content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {**sizes, "sha256": digest.hexdigest()}


def header_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's header. Raises OSError."""
    with path.open("rb") as file:
        size = file.read(8)
        return hashlib.sha256(
            size + file.read(min(int.from_bytes(size, "little"), path.stat().st_size))
        ).hexdigest()


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU."""
    return values.reshape(-1).view(torch.uint8).numpy().data


@functools.cache
def safetensors_dtype(dtype: torch.dtype) -> str | None:
    """The format's name of a dtype; None if it has none, such as complex128."""
    try:
        content = save({"x": torch.empty(0, dtype=dtype)})
    except KeyError:
        return None
    return str(json.loads(content[8:])["x"]["dtype"])
