"""CPU seconds of every test, its fixtures and the processes that it starts, as lines of a CSV file.

`pytest --cpu-times FILE` appends to the file; all workers of pytest-xdist write to the same one.
What an idle machine and a busy one need of the clock differs; CPU seconds hardly do. `sort -rn FILE`
shows the dearest tests.
"""

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


class CpuTimes:
    """Notes what each test of this process costs."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = cpu_seconds()
        try:
            return (yield)
        finally:
            with self.file.open("a", newline="") as out:
                slow = "slow" if item.get_closest_marker("slow") else ""
                spent = max(
                    0.0, cpu_seconds() - before
                )  # with its last worker a pool takes its past away
                csv.writer(out).writerow([f"{spent:.2f}", slow, item.nodeid])


def cpu_seconds() -> float:
    """Of this process, of those that it has started and of theirs, ended or not."""
    parents, spent = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[folder.name], spent[folder.name] = fields[1], sum(map(int, fields[11:15]))
    ours = str(os.getpid())
    return (
        sum(ticks for process, ticks in spent.items() if _descends(process, ours, parents)) / TICKS
    )


def _descends(process: str, ancestor: str, parents: dict[str, str]) -> bool:
    while process in parents and process != ancestor:
        process = parents[process]
    return process == ancestor
