"""What a machine can do, as figures of a file: arithmetic, memory, kernels, links. Each figure has
its source."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from zbcompile.field_check import TEXT, wrong_field, wrong_names
from zbcompile.passes.errors import CompileError
from zbcompile.passes.machine import figures
from zbcompile.untrusted_text import read_text

DOTS = 50  # in a dotted name, for whose parts tomllib takes quadratic time


class Connection(NamedTuple):
    """A message of n bytes takes `latency` + n / `bandwidth` seconds."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Hardware:
    """One device, its host and its links. Seconds, bytes, FLOP per second (a multiply-add is two).

    Args:
        name: For a reader.
        peak: FLOP/s of dense products by dtype ("bfloat16").
        bandwidth: Bytes/s of the device's memory, and `bandwidth_efficiency` what a large kernel
            gets of it.
        memory: Bytes of the device's memory; None if unlimited.
        launch: From one kernel to the next, at least.
        start: What the host does between two passes.
        overlaps: Whether a kernel's arithmetic hides the bytes that it moves; else the two add up.
        product_efficiency: What a large product gets of the peak, and `attention_efficiency` a
            fused attention kernel.
        units, tiles: How many processors share a product, and the tiles, largest first, of which
            they take one each at a time: a last wave that is not full costs as much as a full one.
            None without units.
        depth: The length of a sum at which half of a product's time is its start and end.
        random: Random numbers per second; None if they cost nothing beyond their bytes.
        node_ranks: How many ranks a node has; `within` connects them, `between` those of two nodes.
            `exchange` is what a collective inside of the graphs gets: None as `within`, and without
            that what gloo gets on one machine.
        paired: Whether every two ranks of a node have a link of their own, `within`, instead of a
            switch: a collective of n ranks then gets n - 1 of them.
        sources: Where the figures come from, by field.

    Raises CompileError for a figure that cannot be.

    >>> Hardware.find("a100-80g").peak["float16"]
    312000000000000.0
    """

    name: str
    peak: Mapping[str, float]
    bandwidth: float
    bandwidth_efficiency: float = 1.0
    memory: float | None = None
    launch: float = 0.0
    start: float = 0.0
    overlaps: bool = True
    product_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    units: int | None = None
    tiles: Sequence[Sequence[int]] = ()
    depth: float = 0.0
    random: float | None = None
    node_ranks: int | None = None
    within: Connection | None = None
    between: Connection | None = None
    exchange: Connection | None = None
    paired: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = wrong_field(FIGURES, vars(self))
        if wrong is not None:
            raise CompileError(wrong)
        for name in _CONNECTIONS:
            if isinstance(given := getattr(self, name), Mapping):
                object.__setattr__(self, name, Connection(**given))

    def __hash__(self) -> int:
        return hash((self.name, self.bandwidth))

    @classmethod
    def find(cls, name: str) -> "Hardware":
        """The profile called `name`, or the one in a .toml file. Raises CompileError."""
        if name.endswith(".toml"):
            return cls.read(Path(name))
        if name not in (known := hardware_names()):
            near = [each for each in known if name.lower() in each] or get_close_matches(
                name.lower(), known
            )
            near.sort(key=lambda each: "sxm" not in each)  # what most machines have
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise CompileError(
                f"no profile is called {name!r}; {hint}expected {', '.join(known)}, or a FILE.toml."
            )
        return _named(name)

    @classmethod
    def read(cls, file: Path) -> "Hardware":
        """The figures in a file. Raises CompileError for a file that does not hold them."""
        try:
            text = read_text(file, CompileError)
        except OSError as error:
            raise CompileError(f"{file}: {error.strerror or error}.") from error
        names = re.split(r"[\n,=\[\]{}]", re.sub(r"[ \t]", "", text))
        if max(name.count(".") for name in names) > DOTS:
            raise CompileError(f"{file}: a name has more than {DOTS} dots.")
        try:
            return cls.from_dict(tomllib.loads(text))
        except RecursionError:
            raise CompileError(f"{file}: its tables or arrays are nested too deeply.") from None
        except (
            ValueError,
            CompileError,
        ) as error:  # tomllib's own, and that of integers with thousands of digits
            raise CompileError(f"{file}: {error!s:.400}") from None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Hardware":
        """As `to_dict` gives it. Raises CompileError for an unknown or missing name, or a figure
        that cannot be."""
        wrong = wrong_names(FIGURES, {"name", "peak", "bandwidth"}, data)
        if wrong is not None:
            raise CompileError(wrong)
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Plain data without what is not known."""
        plain = asdict(self)
        for name in _CONNECTIONS:
            plain[name] = plain[name] and Connection(*plain[name])._asdict()
        return {
            name: value
            for name, value in plain.items()
            if value is not None and value != {} and value != ()
        }

    def peak_of(self, dtype: str) -> float:
        """FLOP/s of a dtype; of one that is not named that of float32, else the slowest."""
        return self.peak.get(dtype) or self.peak.get("float32") or min(self.peak.values())

    def connection(self, one: int, other: int) -> Connection | None:
        """What connects two ranks; None if messages are free."""
        apart = self.node_ranks is not None and one // self.node_ranks != other // self.node_ranks
        return self.between or self.within if apart else self.within

    def collective(self, ranks: int, apart: int = 1) -> Connection | None:
        """The bandwidth of a collective over `ranks` ranks, each `apart` ranks from the next: the
        slowest link on the way, with the latency of a collective; None if messages are free."""
        link = self.connection(0, (ranks - 1) * apart)
        if link is None or (link == self.within and self.exchange):
            return link and self.exchange
        links = ranks - 1 if self.paired and link == self.within else 1
        return Connection((self.exchange or link).latency, max(1, links) * link.bandwidth)

    def exchange_seconds(self, size: float, kind: str) -> float:
        """Seconds of a collective of this many bytes inside a graph, of a whole node's ranks unless
        `exchange` says otherwise; an "all_reduce" passes them on twice."""
        channel = (
            self.exchange or self.collective(self.node_ranks or 1) or hardware_for("cpu").exchange
        )
        times = 2 if kind == "all_reduce" else 1
        return channel.latency + times * size / channel.bandwidth if channel else 0.0

    def __str__(self) -> str:
        return self.name


_CONNECTIONS = ("within", "between", "exchange")
FIGURES = {
    "name": TEXT,
    "peak": figures.PEAKS,
    "bandwidth": figures.POSITIVE,
    "memory": figures.POSITIVE.or_none(),
    "overlaps": figures.SWITCH,
    "paired": figures.SWITCH,
    "units": figures.COUNT.or_none(),
    "tiles": figures.TILES,
    "random": figures.POSITIVE.or_none(),
    "node_ranks": figures.COUNT.or_none(),
    "sources": figures.SOURCES,
    **dict.fromkeys(("launch", "start", "depth"), figures.AMOUNT),
    **dict.fromkeys(
        ("bandwidth_efficiency", "product_efficiency", "attention_efficiency"), figures.SHARE
    ),
    **dict.fromkeys(_CONNECTIONS, figures.CONNECTION.or_none()),
}


def hardware_names() -> list[str]:
    """The profiles that come with the library."""
    return sorted(
        each.name.removesuffix(".toml")
        for each in _PROFILES.iterdir()
        if each.name.endswith(".toml")
    )


_PROFILES = files("zbcompile.passes.machine") / "profiles"


@cache
def _named(name: str) -> Hardware:
    return Hardware.from_dict(
        tomllib.loads((_PROFILES / f"{name}.toml").read_text(encoding="utf-8"))
    )


def hardware_for(device: str) -> Hardware:
    """What is assumed of a type of device if nothing is said: nominal speeds."""
    return _named("cpu-core" if device == "cpu" else "h100-sxm")


def read_hardware(given: Any) -> Hardware:
    """A profile from its name, a file, its plain data or itself. Raises CompileError; TypeError for
    anything else."""
    if isinstance(given, Hardware):
        return given
    if not isinstance(given, str | PathLike | Mapping):
        raise TypeError
    return Hardware.from_dict(given) if isinstance(given, Mapping) else Hardware.find(str(given))
