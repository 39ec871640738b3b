"""Origin: the line of the user's model that an operation comes from, and the module that it ran in."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import Node

_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_OWN = os.path.dirname(os.path.realpath(__file__)) + os.sep
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+)')


@dataclass(frozen=True)
class Origin:
    """`module` is the path of the innermost module ("" for the model itself), `file` is "" for the loss function."""

    module: str
    file: str
    line: int
    code: str

    @property
    def place(self) -> str:
        """The module, or what stands for it, and the line: `blocks.1.mlp_in gpt.py:27`."""
        return f"{self.module or 'model'} {Path(self.file).name}:{self.line}" if self.file else "loss"

    def __str__(self) -> str:
        return f"{self.module or 'model'}  {shown_path(self.file)}:{self.line}  {self.code}" if self.file else self.code


def origin_of(node: Node) -> Origin | None:
    """Where `node` comes from; None for what no line of the model wrote.

    The innermost frame outside torch counts; a model made of torch's own modules alone has only torch's frames.
    """
    frames = _frames(node.meta.get("stack_trace") or "")
    users = [frame for frame in frames if not os.path.realpath(frame[0]).startswith((_TORCH, _OWN))]
    module = _module(node)
    if users:
        return Origin(module, *users[-1])
    if frames and not module:  # the training step itself calls the loss, whose frames torch.export leaves out
        return Origin("", "", 0, "loss(output, target)")
    return Origin(module, *frames[-1]) if frames else None


def _frames(trace: str) -> list[tuple[str, int, str]]:
    lines = [line.strip() for line in trace.splitlines()]
    found = []
    for text, code in zip(lines, [*lines[1:], ""], strict=False):
        if match := _FRAME.match(text):
            found.append((match["file"], int(match["line"]), "" if _FRAME.match(code) else code))
    return found


def _module(node: Node) -> str:
    """The innermost module by its name in the user's model; the training step around it is not one."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return path.removeprefix("model").removeprefix(".")


def shown_path(file: str) -> str:
    """A file as a reader knows it: relative to the working directory, or as the name inside site-packages."""
    _, _, installed = file.rpartition(f"site-packages{os.sep}")
    if installed != file:
        return installed
    relative = os.path.relpath(file)
    return file if relative.startswith(os.pardir) else relative
