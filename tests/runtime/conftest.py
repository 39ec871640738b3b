"""What the runtime's tests share: one thread, and processes that play the ranks."""

from collections.abc import Iterator

import pytest
import torch

from tests.runtime.pool import Pool, open_pool


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums and norms change their bits with the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes for the whole session; see `tests/runtime/pool.py`."""
    with open_pool() as started:
        yield started
