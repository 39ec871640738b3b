"""Silence while torch works, which logs, warns and prints whole graphs when it fails."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Hide everything that is logged, warned of or printed inside; afterwards the caller's settings are restored."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        streams = contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO())
        with warnings.catch_warnings(), streams[0], streams[1]:
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
