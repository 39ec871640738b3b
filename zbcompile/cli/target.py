"""TARGET on a command line: the name of a function that returns a model and one microbatch."""

import importlib
import os
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from zbcompile.batches.example import Example
from zbcompile.errors import PipelineError

FORMS = "expected package.module:name or path/file.py:name"
RETURNS = (
    "expected (model, args), (model, args, kwargs) or zbcompile.Example(...), args being one"
    " microbatch"
)


def load_example(target: str) -> Example:
    """Import what `target` names (`package.module:name` or `path/file.py:name`), call it, and
    return its example.

    Raises PipelineError if it cannot be found, imported or called, or returns something else.
    """
    maker = load_object(target)
    if not callable(maker):
        raise PipelineError(
            f"{target} is a {type(maker).__name__}; expected a function without arguments."
        )
    try:
        result = maker()
    except Exception as error:
        raise PipelineError(f"calling {target} without arguments failed: {_said(error)}") from error
    if isinstance(result, Example):
        return result
    if isinstance(result, tuple) and len(result) in (2, 3):
        return Example(*result)
    size = f" of {len(result)}" if isinstance(result, tuple) else ""
    raise PipelineError(f"{target} returned a {type(result).__name__}{size}; {RETURNS}.")


def load_object(target: str) -> Any:
    """Import what `target` names. Raises PipelineError if it cannot be found or imported."""
    where, _, name = target.rpartition(":")
    if os.path.isdir(target):
        raise PipelineError(
            f"{target} is a directory without a program (it has no manifest.json); {FORMS}."
        )
    if not where or not name:
        raise PipelineError(f"{target!r} names no function; {FORMS}.")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    try:
        return reduce(getattr, name.split("."), module)
    except AttributeError:
        raise PipelineError(f"{where} has no {name}; {_functions_of(module)}") from None


def _from_file(path: Path) -> ModuleType:
    """Run a file as Python would: modules next to it can be imported."""
    if not path.is_file():
        raise PipelineError(f"file {path} does not exist; {FORMS}.")
    sys.path.insert(0, str(path.parent.resolve()))
    name = path.stem if path.stem not in sys.modules else f"zbcompile_target_{path.stem}"
    sys.modules[name] = module = ModuleType(name)
    module.__file__ = str(path)
    try:
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except Exception as error:
        raise PipelineError(f"running {path} failed: {_said(error)}") from error
    return module


def _from_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise PipelineError(f"importing {name} failed: {_said(error)}; {FORMS}.") from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _functions_of(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    ]
    return f"it defines {', '.join(names[:8]) or 'no function'}"
