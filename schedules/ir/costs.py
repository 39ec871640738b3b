"""What each pass of each stage costs in time and memory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from zbcompile.field_check import AMOUNT, NUMBER, TEXT, Field, is_amount, wrong_field, wrong_names
from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import BW, COMPUTE, Action, B, F, Step, W
from zbcompile.schedules.ir.kinds import KINDS
from zbcompile.untrusted_text import parse_json


class Link(NamedTuple):
    """Messages from rank `source` to rank `destination` take latency + size / bandwidth (`None`: no size term)."""

    source: int
    destination: int
    latency: float
    bandwidth: float | None = None


class PairTime(NamedTuple):
    """A forward of one stage overlapped with a backward of another takes `time` altogether."""

    forward_stage: int
    backward_stage: int
    time: float


@dataclass(frozen=True)
class Costs:
    """Times (any one unit) and memory (any one unit), one entry per stage; ints and fractions stay exact.

    * `forward`, `backward` (input gradient), `weight`: time of F, B and W; no work is 0. BW takes
      backward + weight, less what is `saved` by not splitting.
    * `forward_exchange`, `backward_exchange`: the part of F's and B's time in which the rank waits for collectives of
      the model. The other half of a pair hides it as far as that computes, in BW the products for weights.
    * `vocab_s`, `vocab_t`: time of the vocabulary passes S and T of the shard that a stage names, `vocab_state` what
      the shard holds from S to T; `cast`, `stats`: time of their collectives, C0 and C1 (or C2), by default `comm`.
    * `optimizer`: time of the optimizer step of a stage; `reduce`: from the start of its gradients' sum until that is
      there; `gather`: from the begin of a step until the parameters that were updated before it have arrived, or from
      the begin of a gather of divided ones; `gathered`: what these take meanwhile.
    * `activation`: what F adds; `residue`: what is left of it after B until W (by default all of it).
    * `message`: size of what a stage sends onwards, and of the gradient that comes back for it.
    * `comm`: latency of a hop between two ranks, `bandwidth` its size term (`None`: none); `links` overrides both for
      single links.
    * `overlap`: share of the shorter half that a pair (F|BW) hides, 0 they add up, 1 the longer one decides; `pairs`
      overrides it for single pairs of stages.
    * `barrier`: time of the global check between the last gradient of any rank and the first optimizer step; of one
      that follows behind (VALIDATE), from the begin of the next step.
    * `exchanges`: time of each exchange of all ranks at the begin or end of a step (LOSS, TIE, ...), on every rank.
    * `time_unit`, `memory_unit`: what pictures write behind the numbers.

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
    reduce: tuple[float, ...] = ()
    gather: tuple[float, ...] = ()
    gathered: tuple[float, ...] = ()
    message: tuple[float, ...] = ()
    comm: float = 0
    bandwidth: float | None = None
    links: tuple[Link, ...] = ()
    overlap: float = 0
    pairs: tuple[PairTime, ...] = ()
    barrier: float = 0
    cast: float | None = None
    stats: float | None = None
    exchanges: float = 0
    time_unit: str = ""
    memory_unit: str = ""

    def __post_init__(self) -> None:
        stages = len(self.forward)
        defaults = {"residue": self.activation or (1,) * stages, "activation": (1,) * stages, "message": (1,) * stages}
        for name in PER_STAGE:
            object.__setattr__(self, name, tuple(getattr(self, name)) or defaults.get(name, (0,) * stages))
        object.__setattr__(self, "links", tuple(Link(*link) for link in self.links))
        object.__setattr__(self, "pairs", tuple(PairTime(*pair) for pair in self.pairs))
        self._validate(stages)

    def _validate(self, stages: int) -> None:
        if not stages:
            raise ScheduleError("costs: `forward` is empty; expected one time per stage")
        for name in PER_STAGE:
            values = getattr(self, name)
            if len(values) != stages:
                counts = f"`{name}` has {len(values)} entries, `forward` has {stages}"
                raise ScheduleError(f"costs: {counts}; give one per stage")
        wrong = wrong_field(_FIELDS, vars(self))
        if wrong is not None:
            raise ScheduleError(f"costs: {wrong}")

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
        overlap: float = 0,
        barrier: float = 0,
    ) -> "Costs":
        """The same costs on each of `stages` stages; `residue=None` means all of `activation` stays until W."""
        return cls(
            forward=(forward,) * stages,
            backward=(backward,) * stages,
            weight=(weight,) * stages,
            activation=(activation,) * stages,
            residue=(activation if residue is None else residue,) * stages,
            optimizer=(optimizer,) * stages,
            comm=comm,
            overlap=overlap,
            barrier=barrier,
        )

    @property
    def stages(self) -> int:
        return len(self.forward)

    @property
    def cast_time(self) -> float:
        """The time from the end of the last stage's forward until every shard has its output (C0)."""
        return self.comm if self.cast is None else self.cast

    @property
    def stats_time(self) -> float:
        """The time from the last S (for the second barrier, the last T) until its result is everywhere (C1, C2)."""
        return self.comm if self.stats is None else self.stats

    def times(self, op: str) -> tuple[float, ...]:
        """Time of the compute operation `op` on every stage."""
        if op not in COMPUTE:
            raise ScheduleError(f"costs: {op!r} has no time; expected one of {', '.join(sorted(COMPUTE))}")
        total = self._sum(KINDS[op].time)
        if op == BW and any(self.backward_exchange):
            hidden = map(min, self.backward_exchange, self.weight)
            total = tuple(time - less for time, less in zip(total, hidden, strict=True))
        if op == BW and any(self.saved):
            return tuple(time - less for time, less in zip(total, self.saved, strict=True))
        return total

    def delay(self, op: str, stage: int = 0) -> float:
        """The time from the end of the pass or collective `op` until every vocabulary shard has its result, or as the
        kinds of scope "stage" say; 0 for those that nothing waits for."""
        time = getattr(self, KINDS[op].delay) if KINDS[op].delay else 0
        return time[stage] if isinstance(time, tuple) else time

    def added(self, op: str) -> tuple[float, ...]:
        """What the compute operation `op` adds to the memory of its rank (below 0: frees), on every stage."""
        kind = KINDS[op]
        return tuple(a - f for a, f in zip(self._sum(kind.adds), self._sum(kind.frees), strict=True))

    def _sum(self, names: Sequence[str]) -> tuple[float, ...]:
        """Per stage the sum of the fields called `names`, 0 without any."""
        columns = [getattr(self, name) for name in names]
        return tuple(map(sum, zip(*columns, strict=True))) if names else (0,) * self.stages

    def time(self, op: str, stage: int) -> float:
        """Time of the compute operation `op` on `stage`."""
        return self.times(op)[stage]

    def exchange(self, op: str, stage: int) -> float:
        """The part of a pass's time in which its rank waits for collectives of the model."""
        times = {F: self.forward_exchange, B: self.backward_exchange}
        if op == BW:
            return max(self.backward_exchange[stage] - self.weight[stage], 0)
        return min(times[op][stage], self.time(op, stage)) if op in times else 0

    def waits(self, step: Step) -> float:
        """How long a rank waits in a step for collectives of the model that nothing hides."""
        if isinstance(step, Action):
            return self.exchange(step.op, step.stage)
        (op, stage, _), (other_op, other, _) = step
        both = self.time(op, stage) + self.time(other_op, other)
        hidden = both - self.pair_time(stage, other, other_op, op)
        return max(self.exchange(op, stage) + self.exchange(other_op, other) - hidden, 0)

    def pair_time(self, stage: int, other_stage: int, other_op: str = BW, op: str = F) -> float:
        """Time of a pair: `op` of one stage with `other_op` of another. Each hides what the other one exchanges."""
        for pair in self.pairs if other_op != W else ():
            if (pair.forward_stage, pair.backward_stage) == (stage, other_stage):
                return pair.time
        one, other = self.time(op, stage), self.time(other_op, other_stage)
        waits, others = self.exchange(op, stage), self.exchange(other_op, other_stage)
        hidden = min(waits, other - others) + min(others, one - waits) if waits or others else 0
        if self.overlap and other_op != W:
            hidden = max(hidden, self.overlap * min(one, other))
        return one + other - hidden if hidden else one + other

    def hop(self, stage: int, source: int, destination: int) -> float:
        """Delay between the end of a pass on rank `source` and the use of its message on rank `destination`.

        `stage` is the one whose output travels: forwards of `stage` itself, backwards of `stage` + 1. The same rank: 0.
        """
        if source == destination:
            return 0
        latency, bandwidth = self.comm, self.bandwidth
        for link in self.links:
            if (link.source, link.destination) == (source, destination):
                latency, bandwidth = link.latency, link.bandwidth
        return latency if bandwidth is None else latency + self.message[stage] / bandwidth

    def resized(self, stages: int) -> "Costs":
        """The same model cut into another number of stages: neighbours merged, or each stage cut into equal parts.

        Compares schedules with different numbers of chunks on one model. Raises `ScheduleError` unless one of the two
        numbers divides the other, and for explicit `pairs`, which have no meaning on other stages.
        """
        if stages == self.stages:
            return self
        if stages < 1 or (stages % self.stages and self.stages % stages):
            raise ScheduleError(f"costs of {self.stages} stages do not fit {stages}: give costs for {stages} stages")
        if self.pairs:
            raise ScheduleError(f"costs: explicit `pairs` are for {self.stages} stages, not {stages}; use `overlap`")
        values: dict[str, Any] = {name: _resized(getattr(self, name), stages) for name in PER_STAGE}
        values |= {name: _of_shards(getattr(self, name), stages) for name in ("vocab_s", "vocab_t", "vocab_state")}
        last = [((stage + 1) * self.stages - 1) // stages for stage in range(stages)]
        values["message"] = tuple(self.message[stage] for stage in last)  # what leaves the last of the merged stages
        return replace(self, **values)

    def to_json(self) -> str:
        """One JSON object, as `from_json` reads it; fractions become floats."""
        return json.dumps(asdict(self), default=float)

    @classmethod
    def from_json(cls, text: str) -> "Costs":
        """Read the object that `to_json` writes; everything except `forward`, `backward` and `weight` may be left out.

        >>> Costs.from_json('{"forward": [1, 2], "backward": [1, 2], "weight": [1, 1], "comm": 0.1}').stages
        2
        """
        return cls.from_dict(parse_json(text, ScheduleError, "costs: "))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Costs":
        """As `from_json`, from what `json.loads` returned."""
        known = [f.name for f in fields(cls)]
        if not isinstance(data, Mapping):
            raise ScheduleError(f"costs: received {type(data).__name__}; expected an object with {', '.join(known)}")
        wrong = wrong_names(known, {"forward", "backward", "weight"}, data)
        if wrong is not None:
            raise ScheduleError(f"costs: {wrong}")
        for name in (*PER_STAGE, "links", "pairs"):
            if not isinstance(data.get(name, []), Sequence):
                raise ScheduleError(f"costs: `{name}` is {data[name]!r:.80}; expected a list")
        try:
            return cls(**data)
        except TypeError as error:
            raise ScheduleError(f"costs: {error}") from None


PER_STAGE = tuple(field.name for field in fields(Costs) if field.type == tuple[float, ...])


_EVERY = Field(lambda values: True, "one time per stage", AMOUNT)
_BANDWIDTH = Field(
    lambda value: value is None or (is_amount(value) and value > 0), "a positive number, or none to ignore sizes"
)
_LINK = Field(
    lambda link: all(map(NUMBER.holds, link[:2])) and is_amount(link.latency) and _BANDWIDTH.holds(link.bandwidth),
    f"ranks, which are whole numbers, a latency, {AMOUNT.expected}, and a bandwidth, {_BANDWIDTH.expected}",
)
_PAIR = Field(
    lambda pair: all(map(NUMBER.holds, pair[:2])) and is_amount(pair.time),
    f"stages, which are whole numbers, and a time, {AMOUNT.expected}",
)
_FIELDS = {
    **dict.fromkeys(PER_STAGE, _EVERY),
    **dict.fromkeys(("comm", "barrier", "exchanges"), AMOUNT),
    **dict.fromkeys(("cast", "stats"), AMOUNT.or_none()),
    **dict.fromkeys(("time_unit", "memory_unit"), TEXT),
    "bandwidth": _BANDWIDTH,
    "overlap": Field(lambda value: is_amount(value) and value <= 1, "a share from 0 to 1"),
    "links": Field(lambda links: True, "links", _LINK),
    "pairs": Field(lambda pairs: True, "pairs", _PAIR),
}


def _of_shards(values: tuple[float, ...], stages: int) -> tuple[float, ...]:
    """A rank's shard of the vocabulary is the same, however the model is cut: what any of the merged stages names."""
    size, parts = max(1, len(values) // stages), max(1, stages // len(values))
    merged = (max(values[i : i + size]) for i in range(0, len(values), size))
    return tuple(value for value in merged for _ in range(parts))


def _resized(values: tuple[float, ...], stages: int) -> tuple[float, ...]:
    """Sums over groups of neighbours, or equal parts."""
    if stages < len(values):
        size = len(values) // stages
        return tuple(sum(values[i : i + size]) for i in range(0, len(values), size))
    parts = stages // len(values)
    return tuple(value / parts for value in values for _ in range(parts))
