"""Origin: the line of the user's model that an operation comes from, and the module that it
ran in."""

import linecache
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch.fx import Node

from zbcompile.passes.torch_private import annotated_line, module_stack, stack_trace


def _folder(module: ModuleType) -> str:
    return os.path.dirname(os.path.realpath(str(module.__file__))) + os.sep


_TORCH, _PYTHON = _folder(torch), _folder(os)
_OWN = tuple(
    _folder(sys.modules[name]) for name in ("zbcompile", "zbcompile.passes")
)  # the packages around this file
_real = cache(
    os.path.realpath
)  # it asks the system about every folder of a path, and nodes have a dozen frames each
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+)')


@dataclass(frozen=True)
class Origin:
    """`module` is the path of the innermost module ("" for the model itself).

    `file` is "" for the loss function, and inside regions (torch.no_grad, autocast) whose lines
    torch.export forgets.
    """

    module: str
    file: str
    line: int
    code: str

    @property
    def owner(self) -> str:
        """The module: `blocks.1.mlp_in`."""
        return self.module or ("the model" if self.file else "the loss")

    @property
    def text(self) -> str:
        """The line: `examples/gpt.py:27  return self.mlp_out(x)`."""
        return f"{shown_path(self.file)}:{self.line}  {self.code}" if self.file else self.code

    def __str__(self) -> str:
        return f"{self.owner}  {self.text}"


def origin_of(node: Node) -> Origin | None:
    """Where `node` comes from; None if no module or line of the model made it.

    The innermost frame outside torch counts; a model that consists of torch's own modules has only
    torch's frames. A graph read from a file carries its origins with it.
    """
    if "origin" in node.meta:
        return cast(Origin, node.meta["origin"])
    if annotated_line(node) is not None:
        return _annotated_origin(node)
    frames = _frames(stack_trace(node))
    users = [frame for frame in frames if not _real(frame[0]).startswith((_TORCH, *_OWN))]
    path, _ = next(
        reversed(module_stack(node).values()), ("", None)
    )  # "model" is the user's, "" the training step
    module = path.removeprefix("model").removeprefix(".")
    if users:
        return Origin(module, *users[-1])
    if (
        frames and not path
    ):  # the training step itself calls the loss, whose frames torch.export leaves out
        return Origin("", "", 0, "loss(output, target)")
    others = [frame for frame in frames if not _real(frame[0]).startswith(_OWN)]
    if others:
        return Origin(module, *others[-1])
    return Origin(module, "", 0, "(torch.export keeps no line here)") if module else None


def _annotated_origin(node: Node) -> Origin | None:
    """Returns the origin of a node of an exported step, which is annotated with `file:line`."""
    file, _, number = (annotated_line(node) or "").rpartition(":")
    path, _ = next(reversed(module_stack(node).values()), ("", None))
    module = path.partition("@")[0].removeprefix("model").removeprefix(".")
    if not file:
        return Origin(module, "", 0, "") if module else None
    module = module if path else "the loss"
    return Origin(module, file, int(number), linecache.getline(file, int(number)).strip())


def source_line(node: Node) -> str:
    """The line of the user's model, or the compiler pass, that made `node`."""
    origin = origin_of(node)
    return origin.text if origin else f"made by {node.meta.get('pass', 'zbcompile')}"


def is_own(file: str) -> bool:
    """Whether a file is a part of this project."""
    return _real(file).startswith(_OWN)


_NOT_USERS = frozenset((*sys.stdlib_module_names, "torch", "numpy", "sympy", "zbcompile")) - {
    "__main__"
}


def is_users_name(module: object) -> bool:
    """Whether the name of a module is none of Python's, torch's, numpy's or ours."""
    return isinstance(module, str) and module.partition(".")[0] not in _NOT_USERS


def is_users(kind: Any) -> bool:
    """Whether a class, function or module is none of Python's, torch's or ours."""
    if isinstance(kind, ModuleType):
        return is_users_name(vars(kind).get("__name__"))
    return is_users_name(getattr(kind, "__module__", None))


def _frames(trace: str) -> list[tuple[str, int, str]]:
    lines = [line.strip() for line in trace.splitlines()]
    found = []
    for text, code in zip(lines, [*lines[1:], ""], strict=False):
        match = _FRAME.match(text)
        if match and not match["file"].startswith(
            "<"
        ):  # a generated function has no file to look at
            found.append((match["file"], int(match["line"]), "" if _FRAME.match(code) else code))
    return found


def shown_path(file: str) -> str:
    """A path as the reader knows it: relative to the working directory, or to site-packages."""
    _, _, installed = file.rpartition(f"site-packages{os.sep}")
    if installed != file:
        return installed
    relative = os.path.relpath(file)
    return file if relative.startswith(os.pardir) else relative
