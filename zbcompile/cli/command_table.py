"""The commands: `python -m zbcompile NAME`, or `python -m zbcompile.NAME`.

A command's module, and with it torch, is imported only when the command runs, after a line that
says so.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from zbcompile.cli.parsers import COMMAND_LINES, parser_of
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
        chosen = parser_of(name).parse_args(arguments)
        from zbcompile.cli.command_line import run_command

        return run_command(name, import_module(COMMANDS[name][0]).run, chosen, say)

    return main


def run_and_exit(name: str, arguments: list[str] | None = None) -> NoReturn:
    """Runs a command and ends the process.

    Compiling makes many small objects that are never freed. With the default thresholds the garbage
    collector walks them again and again, which takes a sixth of the time of `inspect`.
    """
    gc.set_threshold(1_000_000)
    with Progress(f"zbcompile {name}: loading") as report:
        status = main_of(name)(sys.argv[1:] if arguments is None else arguments, report)
    sys.exit(status)


def choose_and_exit() -> NoReturn:
    """`python -m zbcompile NAME ...`."""
    lines = [f"  {command:<12} {sentence}" for command, (_, sentence) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m zbcompile",
        usage="python -m zbcompile COMMAND ...",
        epilog="\n".join([*lines, "", "COMMAND --help lists its arguments."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(sys.argv[1:] or ["--help"])
    run_and_exit(chosen.command, chosen.arguments)
