"""Placements of parameters along the dimensions of the mesh: whether the parameter is equal on all
ranks of a dimension, and whether its gradient is."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from zbcompile.errors import PipelineError

REPLICATE, PARTIAL, SHARD = "replicate", "partial", "shard"
USUAL = {"dp": PARTIAL, "tp": REPLICATE, "cp": PARTIAL, "ep": PARTIAL}
CHOSEN = ("tp", "cp", "ep")  # along "dp" every gradient is summed
Placement = Mapping[str, str]  # by dimension
Placements = Mapping[str, Placement]  # by pattern of names


def read_placements(placements: Any) -> dict[str, dict[str, str]]:
    """Returns the option as a dict of dicts. Raises ValueError for another dimension or another
    word."""
    placement = {str(pattern): dict(along) for pattern, along in dict(placements).items()}
    for along in placement.values():
        if not all(
            name in CHOSEN and word in (REPLICATE, PARTIAL, SHARD) for name, word in along.items()
        ):
            raise ValueError
    return placement


def placement_of(name: str, rules: Placements) -> dict[str, str]:
    """The placement of a parameter or buffer; of several patterns that fit, the last one counts.

    >>> placement_of("layers.0.norm.weight", {"*norm*": {"tp": "partial"}})
    {'dp': 'partial', 'tp': 'partial', 'cp': 'partial', 'ep': 'partial'}
    """
    placement = dict(USUAL)
    for pattern, along in rules.items():
        if fnmatchcase(name, pattern):
            placement |= along
    return placement


def along(placement: Placement, word: str) -> tuple[str, ...]:
    """The dimensions along which a placement says `word`."""
    return tuple(name for name, kind in placement.items() if kind == word)


def require_matches(rules: Placements, names: Iterable[str]) -> None:
    """Raise PipelineError for a pattern that fits no name."""
    names = list(names)
    for pattern in rules:
        if not any(fnmatchcase(name, pattern) for name in names):
            examples = ", ".join(names[:4])
            raise PipelineError(
                f"placements= has {pattern!r}, which fits no parameter or buffer (there are"
                f" {examples}, ...)."
            )
