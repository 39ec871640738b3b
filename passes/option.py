"""One option, stated once: its type, default, check, paragraph, and form on a command line.

An option is a field of `Choices`, `StepOptions` or `Options`, each of which extends the one before with the options of
its room. Keywords and their types, docstrings, flags and the entries of a saved program are all derived from these
fields.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, dataclass_transform

import torch

from zbcompile.passes.torch_names import NAMED

Options = TypeVar("Options")
Given = TypeVar("Given")
Kept = TypeVar("Kept")
SIZES = 'bytes: a number, or a text such as "80GiB" or "24 GB" (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)'
_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}


class UnexpectedValue(ValueError):
    """A value that an option cannot have, with what was expected instead, where that is more than `Kind.expected`."""


@dataclass(frozen=True)
class OptionKind:
    """What an option may be. `read` returns the value to keep for a given one, and raises ValueError or TypeError for
    one that is not `expected`; `flag` says how argparse reads it."""

    read: Callable[[Any], Any]
    expected: str
    flag: Mapping[str, Any] = field(default_factory=dict)

    def or_none(self) -> "OptionKind":
        return OptionKind(lambda given: None if given is None else self.read(given), self.expected, self.flag)


class Reads(Generic[Given, Kept]):
    """The type of an option that may be `Given` in more ways than it is `Kept`; in signatures the former."""

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type) -> Kept: ...
        def __set__(self, instance: object, value: Given) -> None: ...

    else:

        def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
            return types[0]


class OptionFields:
    """What every dataclass of options has, for type checkers."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass_transform(kw_only_default=True)
def options(kind: type[Options]) -> type[Options]:
    """A frozen dataclass of options; type checkers would take a frozen field for one that is kept as it was given."""
    return dataclass(frozen=True, kw_only=True)(kind)


def option(default: Any, kind: OptionKind) -> Any:
    """A field that is an option; the docstring of its class has its paragraph."""
    return field(default=default, metadata={"kind": kind})


def options_of(*classes: type) -> dict[str, Field[Any]]:
    """The options of these dataclasses by name."""
    return {each.name: each for kind in classes for each in fields(kind) if "kind" in each.metadata}


def read_options(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """An instance of dataclass `kind` from the given options. Raises as `Kind.read`, and KeyError for other names."""
    options = options_of(kind)
    return kind(**{name: _read(name, options[name].metadata["kind"], value) for name, value in given.items()})


def _read(name: str, kind: OptionKind, given: Any) -> Any:
    try:
        return kind.read(given)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={given!r}; expected {kind.expected}") from None


def paragraphs_of(kind: type) -> dict[str, str]:
    """The paragraph on each option in the docstrings of a dataclass and its bases; empty under python -OO."""
    found = (re.findall(r"^        (\w+): (.+(?:\n {12}.+)*)", each.__doc__ or "", re.M) for each in kind.__mro__)
    return {name: " ".join(text.split()) for each in found for name, text in each}


def accept(holds: Callable[[Any], bool], expected: str, **flag: Any) -> OptionKind:
    """A kind that keeps values unchanged if `holds` is true of them."""

    def read(given: Any) -> Any:
        if not holds(given):
            raise ValueError
        return given

    return OptionKind(read, expected, flag)


def one_of(*values: str | int, also: str = "") -> OptionKind:
    """A kind with the given values; on a command line numbers among them are written as numbers."""
    names = [f'"{value}"' if isinstance(value, str) else str(value) for value in values]
    expected = f"{', '.join(names[:-1])} or {names[-1]}{also}"
    return accept(
        lambda given: not isinstance(given, bool) and given in values,
        expected,
        choices=values,
        type=lambda text: int(text) if text.isdecimal() else text,
    )


def whole(what: str, least: int | None = 1) -> OptionKind:
    """A whole number of `what`, at least `least`."""

    def read(given: Any) -> int:
        number = operator.index(given)
        if isinstance(given, bool) or (least is not None and number < least):
            raise ValueError
        return number

    return OptionKind(read, f"a {'positive ' if least == 1 else ''}whole number{what}", {"type": int, "metavar": "N"})


def number(expected: str, holds: Callable[[float], bool], metavar: str = "X") -> OptionKind:
    """A number for which `holds` is true."""
    return accept(lambda given: is_real(given) and holds(given), expected, type=float, metavar=metavar)


def read_bytes(given: Any) -> int:
    """Bytes from a number or a text, rounded down. As everywhere outside of memory chips, kB, MB, GB and TB are powers
    of 1000, and KiB, MiB, GiB and TiB those of 1024. Raises ValueError for anything else.

    >>> read_bytes("80GiB"), read_bytes("1.5 GB"), read_bytes("4096"), read_bytes(1.5e9)
    (85899345920, 1500000000, 4096, 1500000000)
    """
    if not isinstance(given, str):
        if not is_real(given) or not math.isfinite(given) or given < 0:
            raise ValueError
        return int(given)
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d{1,2})?)\s*([a-zA-Z]*)", given.strip(), re.ASCII)
    if found is None or found[2] not in _UNITS:
        raise ValueError
    return int(Fraction(found[1]) * _UNITS[found[2]])


def is_real(given: Any) -> bool:
    return isinstance(given, Real) and not isinstance(given, bool)


def _positive_bytes(given: Any) -> int:
    found = read_bytes(given)
    if found < 1:
        raise ValueError
    return found


def _read_dtype(given: Any) -> torch.dtype:
    found = NAMED["dtype"].get(given) if isinstance(given, str) else given
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError
    return found


SWITCH = accept(lambda given: isinstance(given, bool), "True or False", action="store_true")
BYTES = OptionKind(_positive_bytes, f"a positive number of {SIZES}", {"metavar": "BYTES"})
DTYPE = OptionKind(_read_dtype, "a floating-point dtype, such as torch.float32", {"metavar": "DTYPE"})
