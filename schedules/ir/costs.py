"""Costs: what every pass of every stage takes in time and memory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import sub
from typing import Any, NamedTuple

from zbcompile.field_check import AMOUNT, TEXT, Field, is_amount, wrong_field, wrong_names
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import BW, COMPUTE, B, F
from zbcompile.schedules.ir.kinds import COMPUTE_OPS, OPTIMIZER_OPS
from zbcompile.untrusted_text import parse_json


class Link(NamedTuple):
    """Messages from rank `source` to rank `destination` take latency + size / bandwidth (`None`: no
    size term)."""

    source: int
    destination: int
    latency: float
    bandwidth: float | None = None


@dataclass(frozen=True)
class Costs:
    """Times (any one unit) and memory (any one unit), one entry per stage; ints and fractions stay
    exact.

    * `forward`, `backward` (input gradient), `weight`: time of F, B and W. BW takes backward +
      weight, less what is `saved` by not splitting.
    * `forward_exchange`, `backward_exchange`: the part of F's and B's time in which the rank is
      idle until collectives of the model end. The other half of a pair hides it while it computes;
      in BW the weight products do.
    * `vocab_s`, `vocab_t`: time of the vocabulary passes S and T of the shard that a stage names,
      `vocab_state` what the shard holds from S to T. Their collectives take `comm`.
    * `optimizer`: time of the optimizer step of a stage.
    * `activation`: memory that F adds; `residue`: what is left of it from B until W (default: all
      of it).
    * `message`: size of what a stage sends onwards, and of the gradient that comes back for it.
    * `comm`: latency of a hop between two ranks, `bandwidth` its size term (`None`: none); `links`
      overrides both for single links.
    * `time_unit`, `memory_unit`: "s", "FLOP" and "B" are written with a suitable multiple; any
      other unit, or none.

    Raises `ScheduleError` for lengths that differ and for values that are negative or not finite.

    >>> costs = Costs.uniform(4, forward=2, comm=0.5)
    >>> costs.time("F", 0), costs.time("BW", 3), costs.hop(1, 1, 2)
    (2, 2, 0.5)
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    saved: tuple[float, ...] = ()
    activation: tuple[float, ...] = ()
    residue: tuple[float, ...] = ()
    vocab_s: tuple[float, ...] = ()
    vocab_t: tuple[float, ...] = ()
    vocab_state: tuple[float, ...] = ()
    optimizer: tuple[float, ...] = ()
    forward_exchange: tuple[float, ...] = ()
    backward_exchange: tuple[float, ...] = ()
    message: tuple[float, ...] = ()
    comm: float = 0
    bandwidth: float | None = None
    links: tuple[Link, ...] = ()
    time_unit: str = ""
    memory_unit: str = ""

    def __post_init__(self) -> None:
        if wrong := wrong_field(FIELDS, vars(self)):
            raise ScheduleError(f"costs: {wrong}")
        stages = len(self.forward)
        if not stages:
            raise ScheduleError("costs: `forward` is empty; expected one time per stage")
        ones = (1,) * stages
        defaults = {"activation": ones, "residue": self.activation or ones, "message": ones}
        for name in PER_STAGE:
            values = tuple(getattr(self, name)) or defaults.get(name, (0,) * stages)
            object.__setattr__(self, name, values)
            if len(values) != stages:
                counts = f"`{name}` has {len(values)} entries, `forward` has {stages}"
                raise ScheduleError(f"costs: {counts}; give one per stage")
        object.__setattr__(self, "links", tuple(Link(*link) for link in self.links))

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1,
        backward: float = 1,
        weight: float = 1,
        comm: float = 0,
        activation: float = 1,
        residue: float | None = None,
        *,
        optimizer: float = 0,
    ) -> "Costs":
        """Returns the same costs for each of `stages` stages; `residue=None`: all of `activation`
        stays until W."""
        residue = activation if residue is None else residue
        amounts = (forward, backward, weight, 0, activation, residue)
        per_stage: Any = ((amount,) * stages for amount in amounts)
        return replace(cls(*per_stage), comm=comm, optimizer=(optimizer,) * stages)

    @property
    def stages(self) -> int:
        return len(self.forward)

    def times(self, op: str) -> tuple[float, ...]:
        """Returns the time of the compute operation `op` on every stage."""
        if op not in COMPUTE:
            raise ScheduleError(
                f"costs: {op!r} has no time; expected one of {', '.join(sorted(COMPUTE))}"
            )
        total = self._sum((COMPUTE_OPS.get(op) or OPTIMIZER_OPS[op]).time)
        if op != BW:
            return total
        columns = zip(total, self.backward_exchange, self.weight, self.saved, strict=True)
        return tuple(
            time - min(exchange, weight) - saved for time, exchange, weight, saved in columns
        )

    def added(self, op: str) -> tuple[float, ...]:
        """Returns what the compute operation `op` adds to the memory of its rank on every stage;
        below 0: frees."""
        spec = COMPUTE_OPS.get(op)
        return (
            tuple(map(sub, self._sum(spec.adds), self._sum(spec.frees)))
            if spec
            else (0,) * self.stages
        )

    def _sum(self, names: Sequence[str]) -> tuple[float, ...]:
        return tuple(
            map(sum, zip((0,) * self.stages, *(getattr(self, name) for name in names), strict=True))
        )

    def time(self, op: str, stage: int) -> float:
        """Returns the time of the compute operation `op` on `stage`."""
        return self.times(op)[stage]

    def exchange(self, op: str, stage: int) -> float:
        """Returns the part of a pass's time in which its rank is idle until collectives of the
        model end."""
        times = {F: self.forward_exchange, B: self.backward_exchange}
        if op == BW:
            return max(self.backward_exchange[stage] - self.weight[stage], 0)
        return min(times[op][stage], self.time(op, stage)) if op in times else 0

    def pair_time(self, op: str, stage: int, partner_op: str, partner: int) -> float:
        """Returns the time of a pair of passes. Each hides what the other exchanges while it
        computes."""
        exchange, partner_exchange = self.exchange(op, stage), self.exchange(partner_op, partner)
        time, partner_time = self.time(op, stage), self.time(partner_op, partner)
        hidden = min(exchange, partner_time - partner_exchange)
        return time + partner_time - hidden - min(partner_exchange, time - exchange)

    def hop(self, stage: int, source: int, destination: int) -> float:
        """Returns the delay between the end of a pass on rank `source` and the use of its message
        on `destination`.

        `stage` is the one whose output is sent: forwards of `stage` itself, backwards of the next
        stage. The same rank: 0.
        """
        if source == destination:
            return 0
        latency, bandwidth = self.comm, self.bandwidth
        for link in self.links:
            if (link.source, link.destination) == (source, destination):
                latency, bandwidth = link.latency, link.bandwidth
        return latency if bandwidth is None else latency + self.message[stage] / bandwidth

    def resized(self, stages: int) -> "Costs":
        """Returns the costs of the same model cut into another number of stages.

        Neighbours are merged, or each stage is cut into equal parts, so that schedules with
        different numbers of chunks compare on one model. Raises `ScheduleError` unless one of the
        two numbers divides the other.
        """
        if stages == self.stages:
            return self
        if stages < 1 or (stages % self.stages and self.stages % stages):
            raise ScheduleError(
                f"costs of {self.stages} stages do not fit {stages}: give costs for {stages} stages"
            )
        merged = max(1, self.stages // stages)  # stages into one
        parts = max(1, stages // self.stages)  # of a stage
        values: dict[str, Any] = {}
        for name in PER_STAGE:
            columns = [getattr(self, name)[i : i + merged] for i in range(0, self.stages, merged)]
            if name.startswith("vocab"):  # a rank's shard is the same, however the model is cut
                sizes = [max(column) for column in columns]
            elif name == "message":  # what leaves the last of the merged stages
                sizes = [column[-1] for column in columns]
            else:
                sizes = [sum(column) if parts == 1 else sum(column) / parts for column in columns]
            values[name] = tuple(size for size in sizes for _ in range(parts))
        return replace(self, **values)

    def to_json(self) -> str:
        """Returns one JSON object, as `from_json` reads it; fractions become floats."""
        return json.dumps(asdict(self), default=float)

    @classmethod
    def from_json(cls, text: str) -> "Costs":
        """Reads the object that `to_json` writes; only `forward`, `backward` and `weight` are
        required.

        >>> Costs.from_json('{"forward": [1, 2], "backward": [1, 2], "weight": [1, 1]}').stages
        2
        """
        return cls.from_dict(parse_json(text, ScheduleError, "costs: "))

    @classmethod
    def from_dict(cls, data: Any) -> "Costs":
        """Returns the costs in the value of a JSON text."""
        if not isinstance(data, Mapping):
            expected = f"an object with {', '.join(FIELDS)}"
            raise ScheduleError(f"costs: received {type(data).__name__}; expected {expected}")
        if wrong := wrong_names(FIELDS, REQUIRED, data):
            raise ScheduleError(f"costs: {wrong}")
        return cls(**data)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_link(value: Any) -> bool:
    if not _is_list(value) or len(value) not in (3, 4):
        return False
    source, destination, latency, *bandwidth = value
    is_connection = type(source) is type(destination) is int and is_amount(latency)
    return is_connection and all(map(BANDWIDTH.is_valid, bandwidth))


REQUIRED = ("forward", "backward", "weight")
PER_STAGE = tuple(field.name for field in fields(Costs) if field.type == tuple[float, ...])
BANDWIDTH = Field(lambda value: is_amount(value) and value > 0, "more than 0").or_none()
LINK = Field(_is_link, "source and destination rank, latency and bandwidth")
FIELDS = {
    **dict.fromkeys(PER_STAGE, Field(_is_list, "a list with one number per stage", AMOUNT)),
    "comm": AMOUNT,
    "bandwidth": BANDWIDTH,
    "links": Field(_is_list, "a list of links", LINK),
    "time_unit": TEXT,
    "memory_unit": TEXT,
}
