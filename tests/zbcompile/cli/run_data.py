"""Data functions for `zbcompile.run`: batches in every form that it takes."""

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch

from tests.support.checkpointing import LENGTH, SIZE

Batch = tuple[tuple[Any, ...], dict[str, Any]]


def drawn(generator: torch.Generator | None = None) -> Batch:
    """A batch from torch's and Python's generators, or from one given."""
    tokens = torch.randint(0, 256, (SIZE, LENGTH + 1), generator=generator)
    tokens[0, 0] = 0 if generator else random.randrange(256)
    return (tokens[:, :-1].contiguous(),), {"target": tokens[:, 1:].contiguous()}


def batches() -> Iterator[Batch]:
    """Batches that depend on all that were drawn before."""
    while True:
        yield drawn()


def batches_from(start: int) -> Iterator[Batch]:
    """The same, by a function that need not draw again what was trained on: the generators are in
    the checkpoint."""
    for _ in count(start):
        yield drawn()


def numbered(start: int, seed: int) -> Iterator[Batch]:
    """Yields batches that depend on their number alone."""
    for step in count(start):
        yield drawn(torch.Generator().manual_seed(1000 * seed + step))


class Loader:
    """An iterable that knows its place."""

    place = 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in numbered(self.place, 3):
            self.place += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def loader() -> Loader:
    return Loader()


def two() -> list[Batch]:
    return [drawn(), drawn()]


def bare() -> list[torch.Tensor]:
    return [torch.zeros(SIZE, LENGTH)]
