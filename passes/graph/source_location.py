"""The line of the user's model that an operation comes from, and the module that it ran in."""

import linecache
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from types import FrameType

from torch.fx import Node

from zbcompile.passes.torch_private import annotations_of, module_stack

LINE = "line"  # key of an annotation: file and line of the user's code
_LIBRARIES = ("torch", "zbcompile", "contextlib")
_STEP = "zbcompile.passes.capture.training_step"  # calls the model and the loss
_NOT_USERS = frozenset((*sys.stdlib_module_names, "torch", "numpy", "sympy", "zbcompile")) - {
    "__main__"
}


def users_line(frame: FrameType | None) -> str:
    """Returns `file:line` of the innermost frame outside of torch and this library.

    For a model that consists of modules of torch, it is the innermost frame of torch.nn.
    """
    torch_line = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if is_users_frame(frame):
            return _line_of(frame)
        if name.startswith("torch.nn.") and not torch_line:
            torch_line = _line_of(frame)
        if name == _STEP:
            break
        frame = frame.f_back
    return torch_line


def is_users_frame(frame: FrameType) -> bool:
    """Returns True for a frame of a function of neither torch nor this library."""
    if frame.f_code.co_filename == "<string>":  # code that torch generates, without a line to show
        return False
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES


def is_called_by_user(frame: FrameType | None) -> bool:
    """Returns True if a frame is the user's. Function modes, and fork_rng, pass on what their
    callers do."""
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__"
        or frame.f_globals.get("__name__") in ("contextlib", "torch.random")
    ):
        frame = frame.f_back
    return frame is not None and is_users_frame(frame)


def _line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of(node: Node) -> str:
    """Returns `file:line` of the user's code that a node comes from; "" if it is not known."""
    return str(annotations_of(node).get(LINE, ""))


@dataclass(frozen=True)
class Origin:
    """`module` is the path of the innermost module ("" for the model itself), `file` "" for
    operations without a line."""

    module: str
    file: str
    line: int

    @cached_property
    def code(self) -> str:
        """The line of source code."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def owner(self) -> str:
        """The module: `blocks.1.mlp_in`."""
        return self.module or ("the model" if self.file else "the loss")

    @property
    def text(self) -> str:
        """The line: `examples/gpt.py:27  return self.mlp_out(x)`."""
        return f"{shown_path(self.file)}:{self.line}  {self.code}" if self.file else ""


def origin_of(node: Node) -> Origin | None:
    """Returns the origin of a node; None if no module or line of the model produced it."""
    path, _ = next(reversed(module_stack(node).values()), ("", None))
    module = str(path).partition("@")[0].removeprefix("model").removeprefix(".")
    file, _, number = line_of(node).rpartition(":")
    if not file:
        return Origin(module, "", 0) if module else None
    return Origin(module if path else "the loss", file, int(number))


def is_users_name(module: object) -> bool:
    """Returns True if the name of a module is none of Python's, torch's, numpy's or ours."""
    return isinstance(module, str) and module.partition(".")[0] not in _NOT_USERS


def shown_path(file: str) -> str:
    """Returns a path relative to the working directory, or to site-packages."""
    _, _, installed = file.rpartition(f"site-packages{os.sep}")
    if installed != file:
        return installed
    relative = os.path.relpath(file)
    return file if relative.startswith(os.pardir) else relative
