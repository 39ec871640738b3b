"""torchrun whose ranks are forked from it (`--run-path`, `--start-method fork`), with what it has imported.

Importing torch and zbcompile takes a rank seconds. `tests/zbcompile/cli/test_torchrun.py` has ranks that torchrun
starts by itself.
"""

import shlex
import sys
from pathlib import Path

FORKING = ["--run-path", "--start-method", "fork"]


def warm_torchrun(imports: str, *arguments: str) -> list[str]:
    """The command, with torchrun's `arguments`; `imports` are statements that import what ranks need."""
    start = "import gc\ngc.set_threshold(50_000, 20, 20)"  # see `tests/conftest.py`
    text = f"{start}\n{imports}\ngc.freeze()\nfrom torch.distributed.run import main\nmain()"
    return [sys.executable, "-c", text, *FORKING, *arguments]


def install(folder: Path, imports: str) -> None:
    """Make `folder`/torchrun, which is that command, with one thread for a rank as torchrun sets it."""
    interpreter, option, text, *forking = warm_torchrun(imports)
    command = f'{interpreter} {option} {shlex.quote(text)} {" ".join(forking)} "$@"'
    folder.mkdir(exist_ok=True)
    (folder / "torchrun").write_text(f"#!/bin/bash\nOMP_NUM_THREADS=1 exec {command}\n")
    (folder / "torchrun").chmod(0o755)
