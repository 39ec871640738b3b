"""Text that anyone may have written, read within limits: only regular files of a limited size, UTF-8, and JSON of a
limited number of values and levels. Nothing here blocks, fills the memory or recurses without end.

Every function is given the error family of its caller. This module imports nothing of the library, so all rooms may
import it.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

Family = type[Exception]
TEXT = 1 << 24  # bytes: no schedule, record or table of costs is larger
VALUES = 1 << 20  # of one text; a value takes up to 140 bytes of memory once it is an action
LONG_TEXT, MORE_VALUES = 1 << 26, 3 << 20  # of what programs write and read: indexes of weights, records
DEPTH = 400  # lists and objects inside each other
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def opened_regular(path: str | Path, family: Family) -> Iterator[BinaryIO]:
    """Open a regular file. Raises `family` for anything else, which is never waited for, and OSError."""
    try:
        _require_regular(path, os.stat(path), family)  # opening some devices has effects
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe put there meanwhile cannot block
    except ValueError as error:  # a name with a null byte, or that the file system cannot encode
        raise family(f"{str(path)!r} is no name of a file: {error}.") from None
    with open(handle, "rb") as file:
        _require_regular(path, os.fstat(file.fileno()), family)
        yield file


def _require_regular(path: str | Path, found: os.stat_result, family: Family) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise family(f"{path} is not a regular file, but {kind}.")


def read_text(path: str | Path, family: Family, most: int = TEXT) -> str:
    """The text in a UTF-8 file of at most `most` bytes. Raises `family`, and OSError if the file cannot be opened."""
    with opened_regular(path, family) as file:
        content = file.read(most + 1)
        if len(content) > most:
            size = max(os.fstat(file.fileno()).st_size, len(content))
            raise family(f"{path} has {size:,} bytes; expected at most {most:,}.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise family(f"{path} is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}.") from None


def read_json(path: str | Path, family: Family, most: int = TEXT, values: int = VALUES) -> Any:
    """The value in a JSON file. Raises as `read_text` and `parse_json`."""
    return parse_json(read_text(path, family, most), family, f"{path}: ", values)


def parse_json(text: str, family: Family, where: str = "", values: int = VALUES) -> Any:
    """The value of a JSON text. Raises `family`, with `where` before the problem, for text that is not JSON (NaN and
    Infinity are not), has integers of thousands of digits, more than `values` values, or more than DEPTH levels.

    >>> parse_json('{"a": [1, 2]}', ValueError)
    {'a': [1, 2]}
    """
    if text.count(",") + text.count("[") + 4 * text.count("{") > values:  # an object takes the memory of four values
        raise family(f"{where}more than {values:,} JSON values.")
    try:
        found = json.loads(text, parse_constant=_refuse)
        if not _deeper(found, DEPTH):
            return found
    except RecursionError:
        pass
    except ValueError as error:
        raise family(f"{where}invalid JSON: {error}") from None
    raise family(f"{where}JSON of more than {DEPTH} levels.")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than that many levels deep."""
    level = [value]
    for _ in range(levels + 1):
        inside = (each.values() if type(each) is dict else each for each in level if type(each) in (dict, list))
        level = [each for values in inside for each in values if type(each) in (dict, list)]
        if not level:
            return False
    return True
