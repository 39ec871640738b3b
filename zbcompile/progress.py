"""Reports the progress of long work on standard error: soon after it begins, then repeatedly."""

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

Say = Callable[[str], None]
FIRST, AGAIN = 1.0, 10.0  # seconds of silence before the first line and before each later one
LONG = 5.0  # seconds before a compilation inside of a step says that it is one


def silent(text: str) -> None:
    """Says nothing."""


class Progress:
    """A context that reports long work in it.

    It writes a line with the seconds so far after `first` seconds, and one whenever nothing was
    written for ten. The text is that of the last call; with "" it is silent. On a terminal every
    call writes its line immediately. Under torchrun only the first rank writes.
    """

    def __init__(self, text: str, first: float = FIRST) -> None:
        self._text, self._first, self._said = text, first, ""
        self._stream: TextIO = sys.stderr  # later it may have been replaced
        self._began = self._written = time.monotonic()
        self._ended, self._speaks = threading.Event(), os.environ.get("RANK", "0") == "0"
        self._thread = threading.Thread(target=self._watch, name="zbcompile progress", daemon=True)

    def __call__(self, text: str) -> None:
        self._text = text
        if text and self._speaks and self._stream.isatty():
            self._write()

    def __enter__(self) -> "Progress":
        if self._speaks:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._speaks:
            self._thread.join()

    def _watch(self) -> None:
        silence = self._first
        while not self._ended.wait(max(0.05, self._written + silence - time.monotonic())):
            if time.monotonic() - self._written >= silence:
                silence = AGAIN
                self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        if self._text:
            text = f"still {self._text}" if self._text == self._said else self._text
            print(f"{self._written - self._began:7.1f} s  {text}", file=self._stream, flush=True)
            self._said = self._text
