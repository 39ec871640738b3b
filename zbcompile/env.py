"""Environment variables, read once when a pipeline is made or compiled. Here is the whole list."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zbcompile.errors import PipelineError

_TRUTH = {"": False, "0": False, "1": True}


@dataclass(frozen=True)
class Switch:
    """One switch; it is on if the environment variable `name` is 1."""

    name: str
    help: str

    def read(self, environment: Mapping[str, str] = os.environ) -> bool:
        """Returns True if it is on. Raises PipelineError for a value that is neither 0 nor 1."""
        value = environment.get(self.name, "")
        if value not in _TRUTH:
            raise PipelineError(f"{self.name}={value!r}; expected 0 or 1.")
        return _TRUTH[value]

    def __str__(self) -> str:
        return f"{self.name}=1  {self.help}; now {os.environ.get(self.name, 'off')}"


@dataclass(frozen=True)
class Folder:
    """A folder that the environment variable `name` may name."""

    name: str
    help: str

    def read(self, environment: Mapping[str, str] = os.environ) -> Path | None:
        """The folder, absolute; None if none is named."""
        folder = environment.get(self.name)
        return Path(folder).expanduser().absolute() if folder else None

    def __str__(self) -> str:
        return f"{self.name}=DIR  {self.help}; now {self.read() or 'not set'}"


DUMP = Folder(
    "ZBCOMPILE_DUMP", "write the graphs of every pass of the compiler into files of this folder"
)
ORDERED = Switch(
    "ZBCOMPILE_ORDERED",
    "send messages over gloo as NCCL does: one connection per direction of two ranks, matched by"
    " order alone",
)
TORCH_LOGS = Switch(
    "ZBCOMPILE_TORCH_LOGS",
    "show what torch logs while it traces a model, as --debug does: whole graphs and tracebacks if"
    " that fails",
)
OF_MESSAGES = (ORDERED,)  # these change what ranks send, or when: all ranks set them alike
VARIABLES = (DUMP, ORDERED, TORCH_LOGS)
