"""`python -m zbcompile`: every command has its door, and says what it does while nothing else is to
be seen."""

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.damage_sweep import save_program
from zbcompile.cli import command_table
from zbcompile.cli.command_table import COMMANDS
from zbcompile.cli.parsers import FLAGS, FORWARDS, OPTION_FLAGS
from zbcompile.options import BACKENDS
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.program import output
from zbcompile.progress import Progress


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_two_doors(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = "schedules.__main__" if name == "schedules" else name
    with pytest.raises(SystemExit):
        import_module(f"zbcompile.{end}").main(["--help"])
    parsed = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["zbcompile", name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        command_table.choose_and_exit()
    assert (stopped.value.code, capsys.readouterr().out) == (0, parsed)
    assert parsed.startswith(f"usage: python -m zbcompile.{name}")


def test_flags_are_those_of_the_options() -> None:
    """What the parsers name without importing torch."""
    more = {"schedule", "ranks", "microbatches", "chunks", "loss_reduction"}
    assert {*FLAGS} == more | {item.name for item in fields(CompileOptions)}
    assert OPTION_FLAGS["backend"].startswith("|".join(BACKENDS))
    assert {*FORWARDS} <= output.FORWARDS.keys()


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("--version", 0), ("inspekt", 2)])
def test_without_a_command_they_are_listed(
    argument: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["zbcompile", argument])
    with pytest.raises(SystemExit) as stopped:
        command_table.choose_and_exit()
    printed = "".join(capsys.readouterr())
    assert stopped.value.code == status
    assert argument == "--version" or all(name in printed for name in COMMANDS)


HELP = """
import sys
from zbcompile.cli.command_table import run_and_exit
for name in sys.argv[1:]:
    try:
        run_and_exit(name, ["--help"])
    except SystemExit:
        assert "torch" not in sys.modules
"""


def test_help_does_not_wait_for_torch() -> None:
    subprocess.run([sys.executable, "-c", HELP, *COMMANDS], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads CPU seconds in /proc")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_something_within_two_seconds(name: str, tmp_path: Path) -> None:
    """Of a processor: a busy machine may take longer by the clock."""
    if name == "run":
        save_program(tmp_path)
    target = "examples/targets.py:gpt"
    arguments = {
        "inspect": [target, "--ranks=2"],
        "compile": [target, f"--output={tmp_path / 'compiled'}"],
        "run": [f"{tmp_path / 'layers'}", "--data=examples/text_batches.py:batches", "--steps=1"],
        "schedules": ["search", "--ranks=4", "--microbatches=8"],
    }[name]
    command = [sys.executable, "-m", "zbcompile", name, *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, start_new_session=True, **streams) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        status = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        os.killpg(process.pid, signal.SIGKILL)
    assert (int(status[11]) + int(status[12])) / os.sysconf("SC_CLK_TCK") < 2


def test_long_work_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with Progress("short", first=60.0):
        pass
    with Progress("loading", first=0.05) as say:
        say("measuring")
        until = time.monotonic() + 60
        while not stream.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert stream.getvalue().split(" s  ")[1:] == ["measuring\n"]
