"""What a machine can do, as figures of a file: arithmetic, memory, kernels, links. Each figure has its source."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from zbcompile.passes.errors import CompileError


class Connection(NamedTuple):
    """A message of n bytes takes `latency` + n / `bandwidth` seconds."""

    latency: float
    bandwidth: float


class Product(NamedTuple):
    """A measured product of matrices: `batch` times [m, k] by [k, n]."""

    batch: int
    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True)
class Hardware:
    """One device, its host and its links. Seconds, bytes, FLOP per second (a multiply-add is two).

    Args:
        name: For a reader.
        peak: FLOP/s of dense products by dtype ("bfloat16").
        bandwidth: Bytes/s of the device's memory, and `bandwidth_efficiency` what a large kernel gets of it.
        memory: Bytes of the device's memory; None if unlimited.
        launch: From one kernel to the next, at least, and `viewing` what a view takes.
        start: What the host does between two passes.
        overlaps: Whether a kernel's arithmetic hides the bytes that it moves; else the two add up.
        product_efficiency: What a large product gets of the peak, and `attention_efficiency` a fused attention kernel.
        units, tiles: How many processors share a product, and the tiles, largest first, of which they take one each at
            a time: a last wave that is not full costs as much as a full one. None without units.
        depth: The length of a sum at which half of a product's time is its start and end.
        random: Random numbers per second; None if they cost nothing beyond their bytes.
        node_ranks: How many ranks a node has; `within` connects them, `between` those of two nodes. `exchange` is what
            a collective inside of the graphs gets: None as `within`, and without that what gloo gets on one machine.
        products: Measured ones of a "product", a "convolution" and a "convolution_backward" (as the products that they
            are).
        operations: Measured kernels: by the operator's name, (bytes moved, seconds) by rising bytes, of attention by
            FLOPs; "" is for all others.
        sources: Where the figures come from, by field.

    >>> Hardware.find("a100-80g").peak["float16"]
    312000000000000.0
    """

    name: str
    peak: Mapping[str, float]
    bandwidth: float
    bandwidth_efficiency: float = 1.0
    memory: float | None = None
    launch: float = 0.0
    viewing: float = 0.0
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
    products: Mapping[str, Sequence[Product]] = field(default_factory=dict)
    operations: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, self.bandwidth))

    @classmethod
    def find(cls, name: str) -> "Hardware":
        """The profile called `name`, or the one in a .toml file. Raises CompileError."""
        if name.endswith(".toml"):
            return cls.read(Path(name))
        if name not in hardware_names():
            raise CompileError(f"hardware {name!r}: expected {', '.join(hardware_names())}, or a FILE.toml")
        return _named(name)

    @classmethod
    def read(cls, file: Path) -> "Hardware":
        """The figures in a file. Raises CompileError for a file that does not hold them."""
        try:
            return cls.from_dict(tomllib.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise CompileError(f"hardware {file}: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, TypeError, ValueError) as error:
            raise CompileError(f"hardware {file}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Hardware":
        """As `to_dict` gives it. Raises ValueError for a name that is unknown or missing, or a figure out of range."""
        unknown = sorted(set(data) - {each.name for each in fields(cls)})
        missing = sorted({"name", "peak", "bandwidth"} - set(data))
        if unknown or missing:
            what = [f"unknown {', '.join(unknown)}"] * bool(unknown) + [f"missing {', '.join(missing)}"] * bool(missing)
            raise ValueError("; ".join(what))
        given = dict(data)
        for name in _CONNECTIONS:
            given[name] = Connection(**given[name]) if isinstance(given.get(name), Mapping) else given.get(name)
        measured = given.get("products", {})
        given["products"] = {name: tuple(Product(*each) for each in found) for name, found in measured.items()}
        found = cls(**given)
        found._require_amounts()
        return found

    def _require_amounts(self) -> None:
        positive = {"bandwidth": self.bandwidth, **{f"peak.{name}": rate for name, rate in self.peak.items()}}
        shares = ("bandwidth_efficiency", "product_efficiency", "attention_efficiency")
        wrong = [name for name, value in positive.items() if not value > 0]
        wrong += [name for name in shares if not 0 < getattr(self, name) <= 1]
        wrong += [name for name in ("launch", "start", "depth") if getattr(self, name) < 0]
        if wrong or not self.peak:
            raise ValueError(f"{', '.join(wrong) or 'peak'}: out of range")

    def to_dict(self) -> dict[str, Any]:
        """Plain data without what is not known."""
        plain = asdict(self)
        for name in _CONNECTIONS:
            plain[name] = plain[name] and Connection(*plain[name])._asdict()
        return {name: value for name, value in plain.items() if value is not None and value != {} and value != ()}

    def peak_of(self, dtype: str) -> float:
        """FLOP/s of a dtype; of one that is not named that of float32, else the slowest."""
        return self.peak.get(dtype) or self.peak.get("float32") or min(self.peak.values())

    def connection(self, one: int, other: int) -> Connection | None:
        """What connects two ranks; None if messages are free."""
        apart = self.node_ranks is not None and one // self.node_ranks != other // self.node_ranks
        return self.between or self.within if apart else self.within

    def exchange_seconds(self, size: float) -> float:
        """What a collective of so many bytes takes inside of a graph."""
        channel = self.exchange or self.within or hardware_for("cpu").exchange
        return channel.latency + size / channel.bandwidth if channel else 0.0

    def __str__(self) -> str:
        return self.name


def hardware_names() -> list[str]:
    """The profiles that come with the library."""
    return sorted(each.name.removesuffix(".toml") for each in _PROFILES.iterdir() if each.name.endswith(".toml"))


_CONNECTIONS = ("within", "between", "exchange")
_PROFILES = files("zbcompile.passes.hardware") / "profiles"


@cache
def _named(name: str) -> Hardware:
    return Hardware.from_dict(tomllib.loads((_PROFILES / f"{name}.toml").read_text(encoding="utf-8")))


def hardware_for(device: str) -> Hardware:
    """What is assumed of a type of device if nothing is said: nominal speeds."""
    return _named("cpu-core" if device == "cpu" else "h100-sxm")


def read_hardware(given: Any) -> Hardware:
    """A profile from its name, a file, its plain data or itself. Raises CompileError, ValueError or TypeError."""
    if isinstance(given, Hardware):
        return given
    return Hardware.from_dict(given) if isinstance(given, Mapping) else Hardware.find(str(given))
