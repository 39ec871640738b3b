"""Captures or silences the logs, warnings and prints of torch while it traces a model.

If tracing fails, torch logs whole graphs and tracebacks before our error's one line."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator

from zbcompile.env import TORCH_LOGS
from zbcompile.torch_private import no_graphs_printed


@contextlib.contextmanager
def without_torchs_logs() -> Iterator[None]:
    """Hide torch's logs inside, unless ZBCOMPILE_TORCH_LOGS=1. Loggers that do not have torch's
    usual level are left alone."""
    if TORCH_LOGS.read():
        yield
        return
    loggers = [
        logging.getLogger(name)
        for name in logging.root.manager.loggerDict
        if name.partition(".")[0] == "torch"
    ]
    loggers = [logger for logger in loggers if logger.level == logging.WARNING]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with no_graphs_printed():
            yield
    finally:
        for logger in loggers:
            logger.setLevel(logging.WARNING)


@contextlib.contextmanager
def with_torchs_logs() -> Iterator[None]:
    """Show torch's logs inside, as with ZBCOMPILE_TORCH_LOGS=1."""
    before = os.environ.get(TORCH_LOGS.name, "")
    os.environ[TORCH_LOGS.name] = "1"
    try:
        yield
    finally:
        os.environ[TORCH_LOGS.name] = before


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Hide everything that is logged, warned of or printed inside; afterwards the caller's settings
    are restored."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        streams = (
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        )
        with warnings.catch_warnings(), streams[0], streams[1]:
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
