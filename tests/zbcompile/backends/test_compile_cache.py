"""The shared folder of compiled things: made once, whole or not there, whatever is killed."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zbcompile.backends.compile_cache import CompileCache
from zbcompile.errors import PipelineError

ROOT = Path(__file__).parents[3]
# Makes the entries that are named, slowly, in two steps; prints which of them it made.
MAKER = """
import sys, time
from pathlib import Path
from zbcompile.backends.compile_cache import CompileCache

folder, pause, first, *keys = sys.argv[1:]

def make(entry):
    (entry / "half").write_text("first")
    print("making", entry.name, flush=True)
    time.sleep(float(pause))
    (entry / "whole").write_text("second")

load = lambda key, entry: sorted(path.name for path in entry.iterdir())
found = CompileCache(Path(folder)).obtain({key: make for key in keys}, load, int(first))
print(*(f"{key}={how}" for key, (_, how) in found.items()), flush=True)
"""


def start(folder: Path, pause: float, first: int, *keys: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKER, str(folder), str(pause), str(first), *keys]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return iter(process.stdout.readline, "")


def make(entry: Path) -> None:
    (entry / "whole").write_text("here")


def names(key: str, entry: Path) -> list[str]:
    return sorted(path.name for path in entry.iterdir())


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "new" / "folder")
    assert cache.obtain({"a": make, "b": make}, names) == {
        "a": (["whole"], "compiled"),
        "b": (["whole"], "compiled"),
    }
    assert cache.obtain({"b": make}, names) == {"b": (["whole"], "loaded")}
    assert cache.has("a")
    assert not cache.has("c")


def test_a_killed_maker_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start(tmp_path, 60, 0, "a")
    assert next(lines(process)).startswith("making")
    cache = CompileCache(tmp_path)
    assert not cache.has("a")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert cache.obtain({"a": make}, names) == {
        "a": (["whole"], "compiled")
    }  # a lock that is left is waited for


@pytest.mark.parametrize(
    "damaged",
    [
        b"czbcompile.room.that.was.moved\nThing\n.",
        b"czbcompile.errors\nThingThatWasRenamed\n.",
        pickle.dumps(["whole"])[:-3],
        b"",
        b"no pickle",
    ],
    ids=["moved module", "renamed class", "cut off", "empty", "garbage"],
)
def test_what_cannot_be_loaded_is_made_again(
    damaged: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(entry: Path) -> None:
        (entry / "pickle").write_bytes(pickle.dumps(["whole"]))

    def load(key: str, entry: Path) -> list[str]:
        return pickle.loads((entry / "pickle").read_bytes())

    cache = CompileCache(tmp_path)
    cache.obtain({"a": make, "b": make}, load)
    (tmp_path / "a" / "pickle").write_bytes(damaged)
    assert cache.obtain({"a": make, "b": make}, load) == {
        "a": (["whole"], "compiled"),
        "b": (["whole"], "loaded"),
    }
    (notice,) = capsys.readouterr().out.splitlines()
    assert notice.startswith(f"zbcompile: {tmp_path / 'a'} cannot be loaded (")
    assert cache.obtain({"a": make}, load) == {"a": (["whole"], "loaded")}


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(PipelineError, match=r"drwxrwx---: others could put code there"):
        CompileCache(tmp_path).obtain({"a": make}, names)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tmp_path.stat().st_uid == 0:
        os.chown(tmp_path, 4711, 4711)
    else:
        monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PipelineError, match="belongs to user"):
        CompileCache(tmp_path).obtain({"a": make}, names)


def test_a_read_only_folder_is_used_if_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CompileCache(tmp_path)
    cache.obtain({"a": make}, names)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache.obtain({"a": make}, names) == {"a": (["whole"], "loaded")}
    with pytest.raises(PipelineError, match="cannot be written"):
        cache.obtain({"a": make, "b": make}, names)


def test_a_flipped_bit_is_noticed_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = CompileCache(tmp_path)
    cache.obtain({"a": make}, names)
    for damaged in (tmp_path / "a" / "whole", tmp_path / "a.sums"):
        content = bytearray(damaged.read_bytes())
        content[-3] ^= 4
        damaged.write_bytes(content)
        assert cache.obtain({"a": make}, names) == {"a": (["whole"], "compiled")}
        assert "cannot be loaded (" in capsys.readouterr().out


def test_what_fails_is_made_again(tmp_path: Path) -> None:
    def fail(entry: Path) -> None:
        (entry / "half").write_text("first")
        raise ValueError("no")

    cache = CompileCache(tmp_path)
    with pytest.raises(ValueError, match="no"):
        cache.obtain({"a": fail}, names)
    assert cache.obtain({"a": make}, names) == {"a": (["whole"], "compiled")}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PipelineError, match=r"cannot be written\. Set ZBCOMPILE_CACHE"):
        CompileCache(tmp_path / "file" / "cache").obtain({"a": make}, names)
