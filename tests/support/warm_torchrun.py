"""torchrun whose ranks are forked from it (`--run-path`, `--start-method fork`), with what it has imported.

Importing torch and zbcompile takes a rank seconds. `tests/zbcompile/cli/test_torchrun.py` and the tutorials start ranks
as torchrun does by itself.
"""

import sys


def warm_torchrun(modules: str, *arguments: str) -> list[str]:
    """The command, with torchrun's `arguments`, of which the path of the script is absolute; `modules` are what to
    import, as an import statement names them."""
    text = f"import gc, {modules}; gc.freeze(); from torch.distributed.run import main; main()"
    return [sys.executable, "-c", text, "--run-path", "--start-method", "fork", *arguments]
