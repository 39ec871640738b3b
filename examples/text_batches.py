"""Data for `python -m zbcompile.run`: batches of text, each a function of the seed and its number
alone.

    python -m zbcompile.run program --data examples/text_batches.py:batches --weights first.safetensors ...

The program is compiled from `examples/targets.py:gpt` with 4 microbatches.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch

import stdlib_text

BATCH, LENGTH = 8, 32  # samples per step, bytes per sample; the program was compiled for these


def batches(start: int, seed: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Endless batches, from number `start` on."""
    text = stdlib_text.load().train
    for step in count(start):
        generator = torch.Generator().manual_seed((seed << 32) + step)
        inputs, targets = stdlib_text.random_batch(text, BATCH, LENGTH, generator)
        yield (inputs,), {"target": targets}
