"""Every kind of action, in one table that text, checks, simulation, memory, lowering and pictures read.

A new kind is one entry in the table; to run it, `zbcompile.runtime.action_loop` needs a handler for it, for what runs
once `zbcompile.runtime.step_run`, and `zbcompile.schedules.visualization.svg` may give it a look of its own. Kinds that
one stage runs once per step (those of the optimizer), or one rank (exchanges), are written with microbatch 0, the
latter with the number of the rank in place of a stage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

Role = Literal["compute", "send", "receive", "collective", "exchange"]
Scope = Literal["microbatch", "shard", "stage", "rank"]
Where = Literal["", "first", "last", "own"]


@dataclass(frozen=True)
class Kind:
    """The properties of the actions written with the letters `op`.

    * `torch`: the letters that torch writes ("": it has none).
    * `scope`: a stage runs it for every "microbatch", a vocabulary "shard" for every microbatch, a "stage" once, a
      "rank" once: exchanges, which all ranks run in the order of the table before or behind all other actions; none
      goes on before all have come. They occur in lowered programs only.
    * `does`: the operations whose work it does; others wait for the first of them.
    * `after`: operations that must have run before on its stage, for its microbatch (of scope "stage": for all);
      `before`: of scope "stage" and "rank", those that must not have run yet.
    * `along`: 1 if results go down the pipeline, from stage to stage + 1, -1 if they go up, 0 if they stay. It needs
      the result of the stage before it on this way; only at the start of the way does it wait for `after` itself.
    * `takes`: the operation whose result it takes from elsewhere: a message or collective carries it. Unless along the
      pipeline, `made_at` says where it is made: on the "first" or "last" stage, or on its "own".
    * `hops`: of a message, how many stages further its values are needed; neighbours exchange those of 1.
    * `time`: the `Costs` per stage that add up to its time; `delay`: the `Costs` time until all shards have its result.
      Of scope "stage": until its result can be taken; of one that awaits the previous step, from the start of the step.
      Of an exchange: how long it takes a rank.
    * `adds`, `frees`: the `Costs` per stage that it adds to the memory of its rank, and frees.
    """

    op: str
    meaning: str
    role: Role = "compute"
    torch: str = ""
    scope: Scope = "microbatch"
    does: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    along: int = 0
    takes: str = ""
    made_at: Where = ""
    hops: int = 1
    time: tuple[str, ...] = ()
    delay: str = ""
    adds: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "does", self.does or (self.op,))

    @property
    def event(self) -> str:
        """The event that it causes, named by the operation that others wait for: B for BW."""
        return self.does[0]


# Properties that several kinds share.
_backward = partial(Kind, after=("F",), along=-1, frees=("activation",))
_shards = partial(Kind, scope="shard", delay="stats_time")
_once = partial(Kind, scope="stage")
_exchange = partial(Kind, role="exchange", scope="rank", delay="exchanges")


FARTHEST = 64  # stages that a value goes straight


def message_op(direction: str, op: str, hops: int = 1) -> str:
    """The letters of a message.

    >>> message_op("SEND", "F"), message_op("RECV", "B", 3)
    ('SEND_F', 'RECV3_B')
    """
    return f"{direction}{'' if hops == 1 else hops}_{op}"


def _message(direction: str, op: str) -> Kind:
    role: Role = "send" if direction == "SEND" else "receive"
    return Kind(f"{direction}_{op}", f"{role} {op}", role, torch=f"{direction}_{op}", takes=op)


def _straight(direction: str, op: str, hops: int) -> Kind:
    near = _message(direction, op)
    return replace(
        near,
        op=message_op(direction, op, hops),
        meaning=f"{near.meaning}, {hops} stages away",
        torch="",
        does=(),
        hops=hops,
    )


def _collective(op: str, meaning: str, delay: str, takes: str = "", made_at: Where = "") -> Kind:
    return Kind(op, meaning, "collective", torch=op, scope="shard", takes=takes, made_at=made_at, delay=delay)


_KINDS = (
    Kind("F", "forward", torch="F", along=1, time=("forward",), delay="cast_time", adds=("activation",)),
    _backward("B", "input gradient", torch="I", time=("backward",), adds=("residue",)),
    Kind("W", "weight gradient", torch="W", after=("B",), time=("weight",), frees=("residue",)),
    _backward("BW", "fused backward", torch="B", does=("B", "W"), time=("backward", "weight")),
    _shards("S", "vocabulary S", takes="F", made_at="last", time=("vocab_s",), adds=("vocab_state",)),
    _shards("T", "vocabulary T", after=("S",), time=("vocab_t",), frees=("vocab_state",)),
    _once("VALIDATE", "total norm of the step before", before=("GATHER", "F"), delay="barrier"),
    _once("GATHER", "arrival of parameters", before=("F",)),
    _once("REDUCE", "start of the gradients' sum", after=("W",), delay="reduce"),
    _once("OPT", "optimizer step", after=("W", "REDUCE"), takes="REDUCE", made_at="own", time=("optimizer",)),
    _message("RECV", "F"),
    _message("RECV", "B"),
    _message("SEND", "F"),
    _message("SEND", "B"),
    _collective("CAST", "output to all shards", "cast_time", "F", "last"),
    _collective("STATS", "statistics of S", "stats_time", "S", "own"),
    _collective("SUM", "input gradient of T", "stats_time", "T", "own"),
    _collective("LOOKUP", "rows of the embedding", "cast_time"),
    _collective("SPREAD", "their gradient", "cast_time", "B", "first"),
    _exchange("ROWS", "the rows of a tied embedding", before=("F",)),
    _exchange("DRAIN", "the last sends"),
    _exchange("TIE", "the sum of tied gradients"),
    _exchange("SYNC", "the end of the sums of gradients"),
    _exchange("BUFFERS", "the buffers of the first replica"),
    _exchange("FINAL", "the update of what the end completes"),
    _exchange("LOSS", "the end"),
    _exchange("OUTPUT", "the exchange of outputs"),
    *(_straight(way, op, hops) for hops in range(2, FARTHEST + 1) for way in ("RECV", "SEND") for op in "FB"),
)
KINDS: Mapping[str, Kind] = {kind.op: kind for kind in _KINDS}


def with_role(*roles: Role) -> frozenset[str]:
    """The operations that have one of these roles.

    >>> sorted(with_role("exchange"))[:3]
    ['BUFFERS', 'DRAIN', 'FINAL']
    """
    return frozenset(op for op, kind in KINDS.items() if kind.role in roles)


def with_scope(scope: Scope) -> frozenset[str]:
    """The compute operations of one scope."""
    return frozenset(op for op, kind in KINDS.items() if (kind.role, kind.scope) == ("compute", scope))
