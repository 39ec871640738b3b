"""The commands: `python -m zbcompile NAME`, or `python -m zbcompile.NAME`.

A command's module, and with it torch, is imported only when the command runs, after a line that
says so.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from zbcompile.cli.parsers import COMMAND_LINES
from zbcompile.progress import Progress, Say, silent
from zbcompile.version import __version__

COMMANDS = {
    "inspect": (
        "zbcompile.inspection.inspect_command",
        "what a model would be compiled to, and how long a step takes",
    ),
    "compile": ("zbcompile.cli.compile_command", "compile ahead of time into a directory"),
    "run": ("zbcompile.cli.run_command", "train a compiled program with a data function"),
    "schedules": (
        "zbcompile.schedules.__main__",
        "orders without a model: list, show, check, compare",
    ),
}
Main = Callable[..., int]


def main_of(name: str) -> Main:
    """The command as a function of its arguments (default: those of the process), which returns the
    exit status."""

    def main(arguments: Sequence[str] | None = None, say: Say = silent) -> int:
        if name not in COMMAND_LINES:
            return int(import_module(COMMANDS[name][0]).main(arguments, say))
        chosen = COMMAND_LINES[name].parser(name).parse_args(arguments)
        from zbcompile.cli.command_line import run_command

        return run_command(name, import_module(COMMANDS[name][0]).run, chosen, say)

    return main


def run_and_exit(name: str, arguments: list[str] | None = None) -> NoReturn:
    """Runs a command and ends the process.

    Compiling makes many small objects that are never freed. With the default thresholds the garbage
    collector walks them again and again, which takes a sixth of the time of `inspect`.
    """
    gc.set_threshold(50_000, 20, 20)
    with Progress(f"zbcompile {name}: loading") as report:
        status = main_of(name)(sys.argv[1:] if arguments is None else arguments, report)
    sys.exit(status)


def choose_and_exit() -> NoReturn:
    """`python -m zbcompile NAME ...`."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        run_and_exit(name, rest)
    if name == "--version":
        print(__version__)
        sys.exit()
    lines = [f"  {command:<12} {sentence}" for command, (_, sentence) in COMMANDS.items()]
    usage = "\n".join(
        [
            "usage: python -m zbcompile COMMAND ...",
            "",
            *lines,
            "",
            "COMMAND --help lists its arguments.",
        ]
    )
    if name in ("--help", "-h"):
        print(usage)
        sys.exit()
    print(f"{usage}\nzbcompile: no command is called {name!r}.", file=sys.stderr)
    sys.exit(2)
