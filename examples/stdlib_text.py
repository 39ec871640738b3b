"""Real text that every machine has: the source of the running Python's standard library."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
EVERY_NTH = 20  # every 20th file is for validation


@dataclass(frozen=True)
class Text:
    """Bytes as two int64 vectors, whole files in either."""

    train: Tensor
    validation: Tensor


def load(device: torch.device | str = "cpu") -> Text:
    """The library's files in the order of their names, every 20th held out for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(
        p.relative_to(root).as_posix()
        for p in root.rglob("*.py")
        if not SKIPPED & set(p.relative_to(root).parts)
    )
    if len(names) < EVERY_NTH:
        raise FileNotFoundError(
            f"{root} has {len(names)} source files of the standard library, too few to train on"
        )
    for_validation = [i % EVERY_NTH == EVERY_NTH - 1 for i in range(len(names))]
    return Text(
        _read(root / n for n, out in zip(names, for_validation, strict=True) if not out).to(device),
        _read(root / n for n, out in zip(names, for_validation, strict=True) if out).to(device),
    )


def _read(files: Iterator[Path]) -> Tensor:
    return torch.frombuffer(
        bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8
    ).long()


def random_batch(
    text: Tensor, batch: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`batch` windows of `length` bytes at random places, and the byte that follows each: two
    `[batch, length]` on the device of the text. The places are drawn on the CPU, alike for every
    device."""
    starts = torch.randint(len(text) - length, (batch,), generator=generator).to(text.device)
    windows = text[starts[:, None] + torch.arange(length + 1, device=text.device)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
