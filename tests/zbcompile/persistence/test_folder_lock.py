"""One writer per folder: who is refused, and when a holder has ended."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import zbcompile
from zbcompile.errors import PipelineError
from zbcompile.persistence.folder_lock import NAME, FolderLock

HOLD = """
import sys
from pathlib import Path
from zbcompile.persistence.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print(lock.attempt(0), flush=True)
sys.stdin.readline()
try:
    lock.require_held()
    lock.close()
    print("held", flush=True)
except Exception as error:
    print(error, flush=True)
"""


class Holder:
    """Another process that holds the folder."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.said() == "True"

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.said()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    found = Holder(tmp_path)
    yield found
    found.process.kill()
    found.process.wait()


def test_a_live_holder_is_named(holder: Holder, tmp_path: Path) -> None:
    assert not FolderLock(tmp_path).attempt(0)
    with pytest.raises(PipelineError, match=rf"written by another run: host .*, process {holder.process.pid}, since 2"):
        FolderLock(tmp_path, patience=0.0).attempt(1.0)
    assert holder.go_on() == "held"
    assert not (tmp_path / NAME).exists()


def test_a_second_run_cannot_save_but_load(holder: Holder, tmp_path: Path) -> None:
    """Also while the first one is stopped: it may go on at any time."""
    model = nn.Linear(2, 2)
    holder.process.send_signal(signal.SIGSTOP)
    with pytest.raises(PipelineError, match=rf"written by another run: host .*, process {holder.process.pid}"):
        zbcompile.save_checkpoint(tmp_path, model, step=2)
    saved = zbcompile.save_checkpoint(tmp_path / "other", model, step=1)
    assert zbcompile.load_checkpoint(tmp_path / "other", model).path == saved
    holder.process.send_signal(signal.SIGCONT)
    assert holder.go_on() == "held"


def test_an_ended_one_is_replaced_at_once(holder: Holder, tmp_path: Path) -> None:
    """Also one whose files a forked process still holds for a moment, and a file of which nothing can be read."""
    holder.process.kill()
    lock = FolderLock(tmp_path)
    assert lock.attempt(5)
    lock.close()
    assert not list(tmp_path.iterdir())
    (tmp_path / NAME).write_bytes(b"\x00\xff")
    assert lock.attempt(0)
    lock.close()


def test_who_lost_the_lock_notices(holder: Holder, tmp_path: Path) -> None:
    """A file server may lose it; whoever has it then is named."""
    (tmp_path / NAME).unlink()
    lock = FolderLock(tmp_path)
    assert lock.attempt(0)
    assert f"taken over by host {os.uname().nodename}, process {os.getpid()}" in holder.go_on()
    lock.require_held()
    lock.close()


@pytest.mark.parametrize("again", [False, True], ids=["removed", "removed and made again"])
def test_a_folder_that_was_removed_is_made_anew(
    again: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    lock = FolderLock(folder)
    assert lock.attempt(0)
    shutil.rmtree(folder)
    if again:
        folder.mkdir()
    lock.keep()
    assert capsys.readouterr().err == f"zbcompile: {folder} was removed; it is made anew.\n"
    lock.require_held()
    (folder / "other").touch()
    (folder / NAME).unlink()
    with pytest.raises(PipelineError, match=r"the lock of .* was removed"):
        lock.keep()
    lock.close()


def test_a_link_to_nothing_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(PipelineError, match="it is a link to nowhere, which does not exist"):
        FolderLock(tmp_path / "link").attempt(0)
