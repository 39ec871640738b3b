"""What a command says on standard error, without the lines that a busy machine adds."""

import re

import pytest

PROGRESS = re.compile(r" *\d+\.\d s  ")


def without_progress(text: str) -> list[str]:
    """The lines of a text, but those that say how long the work has taken so far."""
    return [line for line in text.splitlines() if not PROGRESS.match(line)]


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines written to standard error since the last call, without progress."""
    return without_progress(capsys.readouterr().err)
