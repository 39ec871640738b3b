"""What `python -m zbcompile.run` is asked to do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zbcompile.frontend.options import Options


@dataclass(frozen=True)
class Job:
    """A run, as its command line says it; `python -m zbcompile.run --help` explains every field."""

    directory: Path
    data: str
    steps: int
    optimizer: str
    options: Mapping[str, Any]
    warmup: int = 0
    decay: str = "none"
    clip: float | None = None
    zero: int = 0
    early: bool = False
    validate: str = "before"
    weights: Path | None = None
    init: str | None = None
    checkpoint: Path | None = None
    every: int = 100
    keep: int = 3
    save_async: bool = False
    resume: bool = False
    trust_checkpoint: bool = False
    export: Path | None = None
    seed: int | None = None
    replicas: int = 1
    threads: int | None = None
    operators: tuple[str, ...] = ()
    backend: str | None = None
    timeout: float = Options.timeout
    log_every: int = 10
    debug_nan: bool = Options.debug_nan
    compiling: Mapping[str, Any] = field(default_factory=dict)  # options of zbcompile.pipeline, for a TARGET

    @property
    def update(self) -> dict[str, Any]:
        """What only `pipe.optimizer` does; empty if a torch optimizer will do."""
        asked = {"zero": self.zero, "early": self.early, "validate": self.validate}
        return asked if asked != {"zero": 0, "early": False, "validate": "before"} else {}

    @property
    def is_target(self) -> bool:
        """Whether `directory` is none, but names a function that builds the model."""
        return ":" in self.directory.name and not self.directory.exists()
