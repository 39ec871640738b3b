"""Text and JSON files, read with one error that names the file.

Every function is given the class of its caller's errors. This module imports nothing of the
library, so every package may import it.
"""

import json
from pathlib import Path
from typing import Any, NoReturn

ErrorType = type[Exception]


def read_text(path: str | Path, error_type: ErrorType) -> str:
    """Returns the text of a UTF-8 file. Raises `error_type` if it is not UTF-8, and OSError if it
    cannot be opened."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise error_type(
            f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}."
        ) from None
    except ValueError as error:  # a name with a null byte, or that the file system cannot encode
        raise error_type(f"{str(path)!r} is not a file name: {error}.") from None


def read_json(path: str | Path, error_type: ErrorType) -> Any:
    """Returns the value in a JSON file. Raises as `read_text` and `parse_json`."""
    return parse_json(read_text(path, error_type), error_type, f"{path}: ")


def parse_json(text: str, error_type: ErrorType, where: str = "") -> Any:
    """Returns the value of a JSON text. Raises `error_type`, with `where` before the problem, for
    text that is not JSON, as NaN and Infinity are not.

    >>> parse_json('{"a": [1, 2]}', ValueError)
    {'a': [1, 2]}
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise error_type(f"{where}JSON with too many levels.") from None
    except ValueError as error:
        raise error_type(f"{where}invalid JSON: {error}") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
