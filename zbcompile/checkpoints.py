"""`python -m zbcompile.checkpoints`: look after folders of checkpoints."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zbcompile.cli.checkpoint_commands import print_list, prune_folder, verify
from zbcompile.cli.exit_status import exit_status
from zbcompile.persistence.convert_checkpoint import convert_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    chosen = _parser().parse_args(arguments)
    run: dict[str, Callable[[], None]] = {
        "verify": lambda: verify(chosen.folder),
        "list": lambda: print_list(chosen.folder),
        "prune": lambda: prune_folder(chosen.folder, chosen.keep),
        "convert": lambda: print(convert_checkpoint(chosen.folder, chosen.new, chosen.trust)),
    }
    return exit_status("zbcompile.checkpoints", run[chosen.command], chosen.debug)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zbcompile.checkpoints",
        description="Look after folders of checkpoints. DIR is a folder, or one checkpoint in it.",
        epilog="exit status: 0, or 2 with one line on standard error if something is damaged or cannot be done.",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("verify", "compare every file with its checksum"),
        ("list", "print a table"),
        ("prune", "remove all but the newest whole ones, and what interrupted saves left"),
        ("convert", "write a checkpoint that contains pickles in this release's format, in one process"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("folder", metavar="OLD" if name == "convert" else "DIR", type=Path)
        if name == "prune":
            command.add_argument("--keep", type=int, required=True, metavar="N", help="checkpoints to keep")
        if name == "convert":
            command.add_argument("new", metavar="NEW", type=Path, help="the folder to write the new one into")
            command.add_argument("--trust", action="store_true", help="read pickles, which can run any code")
    return parser


if __name__ == "__main__":
    sys.exit(main())
