"""torchrun whose ranks are forked from it (`--run-path`, `--start-method fork`), with what it has
imported.

Importing torch and zbcompile takes a rank seconds. Ranks that torchrun starts by itself are those of
`python -m docs.page_runs`.
"""

import sys

FORKING = ["--run-path", "--start-method", "fork"]


START = "import gc\ngc.set_threshold(50_000, 20, 20)"  # see `tests/conftest.py`


def warm_torchrun(imports: str, *arguments: str) -> list[str]:
    """The command, with torchrun's `arguments`; `imports` are statements that import what ranks
    need."""
    text = f"{START}\n{imports}\ngc.freeze()\nfrom torch.distributed.run import main\nmain()"
    return [sys.executable, "-c", text, *FORKING, *arguments]
