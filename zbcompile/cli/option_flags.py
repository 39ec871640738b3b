"""The options of `zbcompile.pipeline` as flags of a command line."""

import argparse
from collections.abc import Iterable
from typing import Any

from zbcompile.frontend.options import OPTIONS, PARAGRAPHS


def add_flags(group: Any, names: Iterable[str], **instead: str) -> None:
    """Add a flag for each of these options. Its help is the first sentence of the option's paragraph, or the text that
    `instead` has for it."""
    for name in names:
        option = OPTIONS[name]
        kind, text = option.metadata["kind"], PARAGRAPHS.get(name, "")
        summary = text[:1].lower() + text[1:] if text[1:2].islower() else text
        summary = summary.partition(". ")[0].rstrip(".").replace("`", "").replace("%", "%%")
        default = "" if option.default in (None, False) else f" (default: {option.default})"
        text = instead.get(name, f"{summary}{default}")
        group.add_argument(flag_of(name), default=argparse.SUPPRESS, help=text, **kind.flag)


def flag_of(name: str) -> str:
    """An option as it is written on a command line.

    >>> flag_of("boundary_bytes")
    '--boundary-bytes'
    """
    return f"--{name.replace('_', '-')}"


def split_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What argparse read, with the options that were given under `given`."""
    found = vars(arguments)
    given = {name: found.pop(name) for name in OPTIONS if name in found}
    return {**found, "given": given}
