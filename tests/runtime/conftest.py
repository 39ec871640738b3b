"""What the runtime's tests share: processes that play the ranks."""

from collections.abc import Iterator

import pytest

from tests.runtime.pool import Pool, open_pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for the whole session; see `tests/runtime/pool.py`."""
    with open_pool() as started:
        yield started
