"""Silence while torch works."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logging_disabled(level: int) -> Iterator[None]:
    """As `logging.disable(level)`, and restore the caller's setting afterwards."""
    before = logging.root.manager.disable
    logging.disable(max(level, before))
    try:
        yield
    finally:
        logging.disable(before)
