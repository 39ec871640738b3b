"""Seconds until a command of `python -m zbcompile` says something.

    python -m tests.support.first_output        from the repository's root

A command is started by both of its doors and ended as soon as it has written a first line, on
either stream. On a busy machine the least of some attempts is the command's own time.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tabulate import tabulate

from tests.support.damage import save_program
from zbcompile.cli.command_table import COMMANDS

ATTEMPTS = 3
TARGET = "examples/targets.py:gpt"


def work_for(name: str, folder: Path) -> list[str]:
    """Arguments with which the command has something to do."""
    if name == "run" and not (folder / "program").exists():
        save_program(folder)
    return {
        "inspect": [TARGET, "--ranks", "2"],
        "compile": [TARGET, "--output", str(folder / "compiled")],
        "run": [
            str(folder / "program"),
            "--data",
            "examples/text_batches.py:batches",
            "--steps",
            "1",
        ],
        "schedules": ["search", "--ranks", "4", "--microbatches", "8"],
    }[name]


def doors_of(name: str) -> tuple[list[str], list[str]]:
    """Both ways to start the command."""
    return [f"zbcompile.{name}"], ["zbcompile", name]


def seconds_to_first_line(door: Sequence[str], arguments: Sequence[str]) -> tuple[float, float]:
    """From the start of the process to the first line that it writes, by the clock and of a
    processor; then it is killed."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", *door, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.monotonic() - began
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        worked = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        os.killpg(process.pid, signal.SIGKILL)
    assert line, f"{' '.join(door)} said nothing"
    return took, worked


def least_seconds(name: str, folder: Path) -> list[float]:
    """Of each door, the least time of some attempts, by the clock."""
    arguments = work_for(name, folder)
    return [
        min(seconds_to_first_line(door, arguments)[0] for _ in range(ATTEMPTS))
        for door in doors_of(name)
    ]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [(name, *least_seconds(name, Path(folder))) for name in COMMANDS]
    print(
        tabulate(
            rows,
            ("command", "python -m zbcompile.NAME", "python -m zbcompile NAME"),
            floatfmt=".2f",
        )
    )


if __name__ == "__main__":
    main()
