"""Data for `python -m zbcompile.run`: batches of text, each a function of the seed and its number
alone.

    python -m zbcompile.run program --data examples/text_batches.py:batches --init examples/text_batches.py:init ...

The program is compiled from `examples/targets.py:gpt` with 4 microbatches.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

import stdlib_text

BATCH, LENGTH = 8, 32  # samples per step, bytes per sample; the program was compiled for these


def batches(
    start: int, seed: int, replica: int, replicas: int
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Endless batches, from number `start` on."""
    text = stdlib_text.load().train
    for step in count(start):
        generator = torch.Generator().manual_seed((seed << 32) + step * replicas + replica)
        inputs, targets = stdlib_text.random_batch(text, BATCH, LENGTH, generator)
        yield (inputs,), {"target": targets}


def init(name: str, tensor: Tensor) -> None:
    """Small random matrices; scales of norms begin as 1, offsets as 0."""
    if tensor.dim() > 1:
        nn.init.normal_(tensor, std=0.02)
    else:
        nn.init.constant_(tensor, 1.0 if name.endswith("weight") else 0.0)
