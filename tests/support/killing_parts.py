"""What the processes of `tests/support/killing.py` do; they are forked from one that has imported
this."""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from torch import Tensor, nn

import zbcompile
import zbcompile.run
from tests.support.checkpointing import LENGTH, SIZE, save_program


def compile_(folder: Path, _: list[str]) -> int:
    torch.set_num_threads(1)
    save_program(folder / "program", "zb-h1", 2)
    return 0


def train(folder: Path, arguments: list[str]) -> int:
    torch.set_num_threads(1)
    os.environ["SITE"] = str(folder)
    return zbcompile.run.main(arguments)


def batches() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Batches that depend on all that were drawn before, by two generators; those of a resumed run
    are drawn again."""
    while True:
        time.sleep(0.01)
        tokens = torch.randint(0, 256, (SIZE, LENGTH + 1))
        tokens[0, 0] = random.randrange(256)
        yield (tokens[:, :-1].contiguous(),), {"target": tokens[:, 1:].contiguous()}


def init(name: str, tensor: Tensor) -> None:
    if tensor.dim() > 1:
        nn.init.normal_(tensor, std=0.1)
    else:
        nn.init.constant_(tensor, 1.0 if name.endswith("weight") else 0.0)
