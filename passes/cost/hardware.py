"""Hardware profiles: what a machine can do, in ten figures."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from zbcompile.field_check import TEXT, Field, wrong_field, wrong_names
from zbcompile.passes.errors import CompileError
from zbcompile.passes.torch_names import NAMED
from zbcompile.untrusted_text import read_text


@dataclass(frozen=True)
class Connection:
    """A message of n bytes takes `latency` + n / `bandwidth` seconds."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Hardware:
    """A device and its links, in seconds, bytes and FLOP per second (a multiply-add is two).

    Args:
        name: For a reader.
        peak: FLOP/s of dense products by dtype ("bfloat16").
        bandwidth: Bytes/s of the device's memory.
        memory: Bytes of the device's memory; None if unlimited.
        launch: Seconds from one kernel to the next, at least.
        product_efficiency: Fraction of the peak that products and convolutions reach.
        attention_efficiency: Fraction of the peak that a fused attention kernel reaches.
        bandwidth_efficiency: Fraction of the bandwidth that kernels reach.
        node_ranks: Ranks of a node; None if all ranks are on one.
        within: The connection of two ranks of a node, and of collectives inside of the graphs;
            None if messages take no time.
        between: The connection of ranks on two nodes; as `within` if None.

    Raises:
        CompileError: A figure is not possible.

    >>> Hardware.find("a100-80g").peak["float16"]
    312000000000000.0
    """

    name: str
    peak: Mapping[str, float]
    bandwidth: float
    memory: float | None = None
    launch: float = 0.0
    product_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    node_ranks: int | None = None
    within: Connection | None = None
    between: Connection | None = None

    def __post_init__(self) -> None:
        if (wrong := wrong_field(_FIGURES, vars(self))) is not None:
            raise CompileError(wrong)
        for name in ("within", "between"):
            if isinstance(link := getattr(self, name), Mapping):
                object.__setattr__(self, name, Connection(**link))

    def __hash__(self) -> int:
        return hash((self.name, self.bandwidth))

    @classmethod
    def find(cls, name: str) -> "Hardware":
        """Returns the profile called `name`, or the one in a .toml file.

        Raises:
            CompileError: There is no such profile.
        """
        if name.endswith(".toml"):
            return cls.read(Path(name))
        if name in (names := hardware_names()):
            return _profile(name)
        raise CompileError(
            f"no profile is called {name!r}; expected {', '.join(names)}, or a FILE.toml."
        )

    @classmethod
    def read(cls, file: Path) -> "Hardware":
        """Returns the profile in a file. Raises CompileError for a file without one."""
        try:
            return cls.from_dict(tomllib.loads(read_text(file, CompileError)))
        except OSError as error:
            raise CompileError(f"{file}: {error.strerror or error}.") from error
        except (ValueError, CompileError, RecursionError) as error:
            raise CompileError(f"{file}: {error!s:.400}") from None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Hardware":
        """Returns a profile from its figures by name. Raises CompileError for an unknown or missing
        name, or a figure that is not possible."""
        if (wrong := wrong_names(_FIGURES, {"name", "peak", "bandwidth"}, data)) is not None:
            raise CompileError(wrong)
        return cls(**data)

    def peak_of(self, dtype: str) -> float:
        """Returns the FLOP/s of a dtype; if unknown those of float32, else the lowest."""
        return self.peak.get(dtype) or self.peak.get("float32") or min(self.peak.values())

    def connection(self, source: int, target: int) -> Connection | None:
        """Returns what connects two ranks; None if messages take no time."""
        size = self.node_ranks
        apart = size is not None and source // size != target // size
        return self.between or self.within if apart else self.within

    def collective_seconds(self, size: float, kind: str) -> float:
        """Returns the seconds of a collective of `size` bytes inside of a graph, over the link
        inside of a node; an "all_reduce" passes its bytes on twice."""
        if self.within is None:
            return 0.0
        return self.within.latency + (1 + (kind == "all_reduce")) * size / self.within.bandwidth

    def __str__(self) -> str:
        return self.name


def _is_positive(value: Any) -> bool:
    # beyond these limits times overflow or lose all digits
    return type(value) in (int, float) and 1e-15 <= value <= 1e24


def _is_amount(value: Any) -> bool:
    return _is_positive(value) or (type(value) in (int, float) and value == 0)


def _is_connection(value: Any) -> bool:
    fields = vars(value) if isinstance(value, Connection) else value
    return (
        isinstance(fields, Mapping)
        and fields.keys() == {"latency", "bandwidth"}
        and _is_amount(fields["latency"])
        and _is_positive(fields["bandwidth"])
    )


def _is_table_of_dtypes(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and value.keys() <= {*NAMED["dtype"]}


_POSITIVE = Field(_is_positive, "a number above 0, from 1e-15 to 1e+24")
_FRACTION = Field(lambda value: _is_positive(value) and value <= 1, "a number above 0, at most 1")
_LINK = Field(_is_connection, "latency (seconds, 0 or more) and bandwidth (bytes/s, above 0)")
_FIGURES = {
    "name": TEXT,
    "peak": Field(
        _is_table_of_dtypes, 'a table from dtypes, such as "bfloat16", to FLOP/s', _POSITIVE
    ),
    "bandwidth": _POSITIVE,
    "memory": _POSITIVE.or_none(),
    "launch": Field(_is_amount, "a number, 0 or more"),
    "product_efficiency": _FRACTION,
    "attention_efficiency": _FRACTION,
    "bandwidth_efficiency": _FRACTION,
    "node_ranks": Field(
        lambda value: isinstance(value, int) and _is_positive(value), "a whole number above 0"
    ).or_none(),
    "within": _LINK.or_none(),
    "between": _LINK.or_none(),
}
_PROFILES = files("zbcompile.passes.cost") / "profiles"


def hardware_names() -> list[str]:
    """Returns the names of the profiles that come with the library."""
    names = (file.name for file in _PROFILES.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


@cache
def _profile(name: str) -> Hardware:
    text = (_PROFILES / f"{name}.toml").read_text(encoding="utf-8")
    return Hardware.from_dict(tomllib.loads(text))


def default_hardware(device_type: str) -> Hardware:
    """Returns the profile that is assumed of a type of device if none is named."""
    return _profile("cpu-core" if device_type == "cpu" else "h100-sxm")


def read_hardware(value: Any) -> Hardware:
    """Returns a profile from its name, a file, its plain data or itself.

    Raises:
        CompileError: There is no such profile.
        TypeError: The value is of another type.
    """
    if isinstance(value, Hardware):
        return value
    if isinstance(value, Mapping):
        return Hardware.from_dict(value)
    if isinstance(value, str | PathLike):
        return Hardware.find(str(value))
    raise TypeError
