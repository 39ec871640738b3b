"""Files in the safetensors format: written in one go from the memory of the tensors, and opened."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write contiguous tensors of the CPU, and fsync. A dtype that the format lacks is stored as bytes, U8.

    safetensors.torch.save refuses tensors that share memory, and copies all of them. Raises OSError.
    """
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].element_size(), each[0]))  # keeps each one aligned
    header: dict[str, Any] = {}
    end = 0
    for name, values in ordered:
        kind, begin, end = safetensors_dtype(values.dtype), end, end + values.nbytes
        shape = list(values.shape) if kind else [values.nbytes]
        header[name] = {"dtype": kind or "U8", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in ordered:
            file.write(bytes_of(values))
        file.flush()
        os.fsync(file.fileno())


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU."""
    return values.reshape(-1).view(torch.uint8).numpy().data


def safetensors_dtype(dtype: torch.dtype) -> str | None:
    """The format's name of a dtype; None if it has none, such as complex128."""
    try:
        content = save({"x": torch.empty(0, dtype=dtype)})
    except KeyError:
        return None
    return str(json.loads(content[8:])["x"]["dtype"])


def open_safetensors(path: Path) -> Any:
    """A file, whose tensors are read as they are asked for. Raises OSError or SafetensorError."""
    return safe_open(path, "pt")
