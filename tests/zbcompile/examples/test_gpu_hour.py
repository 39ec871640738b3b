"""The frame of the GPU hour: the list, an item that passes, one that stands still with what it has
started."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

import gpu_hour
from gpu_hour import Item

STANDS_STILL = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_the_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_hour.py", "--list", "--only", "train,tests"])
    assert gpu_hour.main() == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["tests", "train"]
    with pytest.raises(SystemExit):
        gpu_hour.parse(["--list", "--only", "nothing"])
    assert "--only nothing: expected machine, tests" in capsys.readouterr().err
    root = Path(gpu_hour.__file__).parents[1]
    entries = {entry for item in gpu_hour.ITEMS for entry in (*item.arguments, *item.shorter)}
    assert not [name for name in entries if name.endswith(".py") and not (root / name).is_file()]


def _is_gone(pid: str) -> bool:
    """Returns whether a process has ended; init may take its time to bury it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_one_item_stands_still_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_hour, "surroundings", lambda pretended: dict(os.environ))
    monkeypatch.setattr(gpu_hour, "GRACE", 3.0)
    items = [
        Item("still", "stands still", 2, ("-c", STANDS_STILL)),
        Item("wrong", "fails", 30, ("-c", "raise SystemExit('1 < 0')")),
        Item("right", "passes", 30, ("-c", "print(6 * 7)")),
        Item("many", "needs three", 30, ("-c", ""), gpus=3),
    ]
    options = gpu_hour.parse(["--pretended", "--output", str(tmp_path), "--minutes", "2"])
    results = gpu_hour.run_all(items, options)
    assert [result.ended for result in results] == ["over time", "failed", "passed", "not run"]
    until = time.monotonic() + 10
    while not _is_gone(results[0].output):  # what the item had started
        assert time.monotonic() < until
        time.sleep(0.1)
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["pretended"]
    assert "PRETENDED" in data["machine"]["GPUs"]
    assert [item["output"] for item in data["items"]][2] == "42"
    page = (tmp_path / "index.html").read_text()
    assert "1 &lt; 0" in page
    assert "needs 3 GPUs, found 2" in page
