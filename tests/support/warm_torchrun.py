"""torchrun whose ranks are forked from it (`--run-path`, `--start-method fork`), with what it has
imported.

Importing torch and zbcompile takes a rank seconds. Ranks that torchrun starts by itself are those of
`python -m docs.page_runs`.
"""

import os
import subprocess
import sys
from pathlib import Path

FORKING = ["--run-path", "--start-method", "fork"]


START = "import gc\ngc.set_threshold(50_000, 20, 20)"  # see `tests/conftest.py`
AGENTS = """
import multiprocessing, os
def agent(said):
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    main()
fork = multiprocessing.get_context("fork")
agents = [fork.Process(target=agent, args=(said,)) for said in {files!r}]
for each in agents:
    each.start()
for each in agents:
    each.join()
print(*(each.exitcode for each in agents))
"""


def warm_torchrun(imports: str, *arguments: str, run: str = "main()") -> list[str]:
    """The command, with torchrun's `arguments`; `imports` are statements that import what ranks
    need."""
    text = f"{START}\n{imports}\ngc.freeze()\nfrom torch.distributed.run import main\n{run}"
    return [sys.executable, "-c", text, *FORKING, *arguments]


def warm_agents(count: int, folder: Path, imports: str, *arguments: str) -> list[tuple[int, str]]:
    """That command as `count` agents, forked from one process: the exit status of each, and what it
    said."""
    files = [str(folder / f"agent-{number}") for number in range(count)]
    command = warm_torchrun(imports, *arguments, run=AGENTS.format(files=files))
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [
        (int(code), Path(file).read_text())
        for code, file in zip(done.stdout.split(), files, strict=True)
    ]
