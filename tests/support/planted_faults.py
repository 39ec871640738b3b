"""Plants faults in a copy of the library, one at a time, and runs the tests that should find them.

    python -m tests.support.planted_faults            from the repository's root, all of them
    python -m tests.support.planted_faults dropped    those whose name contains "dropped"

Prints the test that found each fault. Ends with status 1 if one was not found.
`tests/test_planted_faults.py` keeps the list in step with the code.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("zbcompile", "passes", "schedules", "tests", "examples", "docs", "pyproject.toml")


@dataclass(frozen=True)
class PlantedFault:
    """A change of one place of the library: `old`, which occurs once in `file`, becomes `new`.
    `tests` are the files or folders that should find it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


SCHEDULES = (
    PlantedFault(
        "backwards go down the pipeline",
        "schedules/ir/dependencies.py",
        "DIRECTION = {F: 1, B: -1}",
        "DIRECTION = {F: 1, B: 1}",
        ("tests/schedules/generators",),
    ),
    PlantedFault(
        "a message of the wrong stage",
        "schedules/lowering/edges.py",
        "at, peer = (stage, route.source)",
        "at, peer = (route.stage, route.source)",
        ("tests/zbcompile/engine/test_edges.py", "tests/zbcompile/engine/test_schedules_run.py"),
    ),
    PlantedFault(
        "a receive is posted after the step that its message is for",
        "schedules/lowering/lower.py",
        "where = posts[peer], graph, run, peer, run.start[node]",
        "where = posts[peer], graph, run, peer, run.end[node] + 2",
        ("tests/schedules/lowering",),
    ),
    PlantedFault(
        "a hop costs what the opposite one costs",
        "schedules/execution/order_graph.py",
        "costs.hop(self.stage, self.source, self.destination)",
        "costs.hop(self.stage, self.destination, self.source)",
        ("tests/schedules/simulation", "tests/schedules/ir"),
    ),
    PlantedFault(
        "an update before the last weight gradient of its stage",
        "schedules/lowering/updates.py",
        "last = {action.stage: index for index, action in actions if W in work_of(action.op)}",
        "last = {action.stage: 0 for index, action in actions if W in work_of(action.op)}",
        ("tests/schedules/lowering",),
    ),
    PlantedFault(
        "a T that does not wait for the statistics of all shards",
        "schedules/ir/dependencies.py",
        "    needed |= {(T, shard): STATS if lowered else S for shard in schedule.shards}\n",
        "",
        ("tests/schedules",),
    ),
)
PERSISTENCE = (
    PlantedFault(
        "a tensor is saved at the wrong offset",
        "zbcompile/persistence/checkpoint_files.py",
        "list(data.chunk.offsets)",
        "[0] * len(data.chunk.offsets)",
        ("tests/zbcompile/persistence",),
    ),
    PlantedFault(
        "a checkpoint gets its name before its index is written",
        "zbcompile/persistence/checkpoint_files.py",
        "                write_whole(partial / INDEX, text.encode())\n"
        "                publish(partial, self.keep)\n",
        "                final = publish(partial, self.keep)\n"
        "                write_whole(final / INDEX, text.encode())\n",
        ("tests/zbcompile/persistence",),
    ),
    PlantedFault(
        "the newest checkpoints are dropped instead of the oldest",
        "zbcompile/persistence/checkpoint_directory.py",
        "[:-keep]",
        "[keep:]",
        ("tests/zbcompile/persistence/test_checkpoint.py",),
    ),
    PlantedFault(
        "lost generators: a resumed run draws other numbers",
        "zbcompile/persistence/checkpoint.py",
        "            restore_random_state(checkpoint.random, ranks.device)\n",
        "            pass\n",
        ("tests/zbcompile/persistence/test_checkpoint.py",),
    ),
)
FAULTS: tuple[PlantedFault, ...] = (*SCHEDULES, *PERSISTENCE)


def main(parts: list[str]) -> int:
    """Plants the faults whose name contains one of `parts`, or all. Returns the exit status."""
    chosen = [fault for fault in FAULTS if not parts or any(part in fault.name for part in parts)]
    missed = 0
    for fault in chosen:
        finder = finding_test(fault)
        missed += finder is None
        print(f"{fault.name}: {finder or 'NOT FOUND'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults found")
    return int(missed > 0)


def finding_test(fault: PlantedFault) -> str | None:
    """Returns the first test that fails with a fault; None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source,
                    copy / name,
                    symlinks=True,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )
            else:
                shutil.copy(source, copy / name)
        path = copy / fault.file
        path.write_text(planted(fault, path.read_text(encoding="utf-8")), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "--tb=no", *fault.tests]
        run = subprocess.run(
            command,
            cwd=copy,
            env={**_environment(), "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    if found is None and run.returncode != 0:
        return f"(pytest ended with status {run.returncode})"
    return found and found[1]


def planted(fault: PlantedFault, text: str) -> str:
    """Returns the text of a file with the fault. Raises ValueError if its place is not there."""
    if text.count(fault.old) != 1:
        raise ValueError(
            f"{fault.name}: {fault.old!r} occurs {text.count(fault.old)} times in {fault.file}"
        )
    return text.replace(fault.old, fault.new)


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
