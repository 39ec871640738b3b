"""One writer per folder: who is refused, and when a holder counts as lost."""

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
from zbcompile.persistence.folder_lock import NAME, FolderLock, read_holder

HOLD = """
import sys, time
from pathlib import Path
from zbcompile.persistence.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), beat=0.1, patience=1.0)
print(lock.attempt(0), flush=True)
sys.stdin.readline()
try:
    lock.require_held()
    print("held", flush=True)
except Exception as error:
    print(error, flush=True)
"""


class Holder:
    """Another process that holds the folder."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
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


def lock_of(folder: Path, patience: float = 60.0) -> FolderLock:
    return FolderLock(folder, beat=0.1, patience=patience)


def test_a_live_holder_is_named(holder: Holder, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=rf"written by another run: host .*, process {holder.process.pid}, since 2"):
        lock_of(tmp_path).attempt(30)
    assert holder.go_on() == "held"
    holder.process.wait()
    assert not (tmp_path / NAME).exists()


def test_a_second_run_cannot_save_but_load(holder: Holder, tmp_path: Path) -> None:
    folder, model = tmp_path / "other", nn.Linear(2, 2)
    saved = zbcompile.save_checkpoint(folder, model, step=1)
    (folder / NAME).symlink_to(tmp_path / NAME)
    with pytest.raises(PipelineError, match=rf"written by another run: host .*, process {holder.process.pid}"):
        zbcompile.save_checkpoint(folder, model, step=2)
    assert zbcompile.load_checkpoint(folder, model).path == saved


def test_an_ended_one_is_replaced_at_once(holder: Holder, tmp_path: Path) -> None:
    holder.process.kill()  # and not waited for: a zombie counts as ended
    lock = lock_of(tmp_path)
    assert lock.attempt(1)
    lock.close()
    assert not list(tmp_path.iterdir())


def test_a_silent_one_is_replaced_and_notices(holder: Holder, tmp_path: Path) -> None:
    holder.process.send_signal(signal.SIGSTOP)
    lock = lock_of(tmp_path, patience=1.0)
    assert not lock.attempt(0)
    assert lock.attempt(30)
    holder.process.send_signal(signal.SIGCONT)
    assert f"taken over by host {os.uname().nodename}, process {os.getpid()}" in holder.go_on()
    holder.process.wait()
    lock.require_held()
    lock.close()


def test_one_of_the_same_elastic_job_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    first = Holder(tmp_path)
    try:
        assert lock_of(tmp_path).attempt(0)
    finally:
        first.process.kill()
        first.process.wait()


def test_a_lock_that_cannot_be_read_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"\x00\xff")
    lock = lock_of(tmp_path, patience=1.0)
    assert not lock.attempt(0)
    assert lock.attempt(30)
    holder = read_holder(tmp_path / NAME)
    assert holder is not None
    assert holder["pid"] == os.getpid()
    lock.close()


@pytest.mark.parametrize("again", [False, True], ids=["removed", "removed and made again"])
def test_a_folder_that_was_removed_is_made_anew(
    again: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    lock = lock_of(folder)
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
        lock_of(tmp_path / "link").attempt(0)
