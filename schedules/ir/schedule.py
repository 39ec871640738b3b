"""A schedule is data: for every rank the order of its actions, and where each stage lives; and its
printed form.

Actions are written in the papers' letters or in torch's: `F0.3`, `B0.3`, `BW0.3` (operation, stage,
microbatch) or `0F3`, `0I3`, `0B3` (stage, operation, microbatch; torch's I is our B, its B our BW).
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from operator import itemgetter
from typing import Any, ClassVar, Literal

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import BW, COMMUNICATION, Action, Pair, S, Step, W, flatten
from zbcompile.schedules.ir.kinds import OPS, TORCH_LETTERS
from zbcompile.schedules.ir.placement import Placement

Orders = tuple[tuple[Step, ...], ...]


class Picturable:
    """Shown in notebooks as a picture of its steps.

    The package sets `picture`, because the modules that draw import this one. The steps of a
    schedule take the times of `Costs`' defaults.
    """

    picture: ClassVar[Callable[[Any], str]]

    def _repr_html_(self) -> str:
        return type(self).picture(self)


@dataclass(frozen=True)
class Schedule(Picturable):
    """`orders[rank]` is the tuple of that rank's actions, or pairs of them.

    `lower` adds the messages. Execution semantics of a schedule with messages, which `check` proves
    safe and every runtime must keep: a RECV posts a receive and returns; a compute action blocks
    until its receives are complete; a SEND may block until the matching receive is posted. On every
    channel (ordered pair of ranks) receives are posted in the order in which the peer sends.

    If there are vocabulary passes, `barriers` says what the backward of the last stage needs: S of
    every shard (1) or T of every shard (2). `lookups` says that the embedding is sharded too: the
    first stage receives the rows that all shards have looked up.
    """

    name: str
    placement: Placement
    microbatches: int
    orders: Orders
    barriers: int = 1
    lookups: bool = False

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    def __str__(self) -> str:
        """The grid of `format_schedule`."""
        return format_schedule(self)

    @cached_property
    def is_lowered(self) -> bool:
        """True if the orders have messages or collectives."""
        return not self.ops.isdisjoint(COMMUNICATION)

    def compute_only(self) -> "Schedule":
        """Returns the schedule without its messages and collectives."""
        return self._compute_only if self.is_lowered else self

    @cached_property
    def _compute_only(self) -> "Schedule":
        return replace(self, orders=compute_only(self.orders))

    def copy_of(self, microbatch: int) -> int:
        """Returns the model copy that a microbatch runs through: 0, or with two copies 1 for the
        second half."""
        return int(self.placement.copies > 1 and microbatch >= self.microbatches // 2)

    def rank_of(self, stage: int, microbatch: int) -> int:
        return self.placement.owners[stage][self.copy_of(microbatch)]

    def microbatches_of(self, stage: int, rank: int) -> range:
        """Returns the microbatches that run through `stage` on `rank`, which owns it."""
        owners, half = self.placement.owners[stage], self.microbatches // 2
        if len(owners) == 1:
            return range(self.microbatches)
        return range(half) if owners[0] == rank else range(half, self.microbatches)

    @cached_property
    def ops(self) -> frozenset[str]:
        """The letters of all its actions, those in pairs included."""
        ops: set[str] = set()
        for order in self.orders:
            heads = set(map(itemgetter(0), order))  # of a pair: its forward
            ops |= heads if heads <= OPS else {action.op for action in flatten(order)}
        return frozenset(ops)

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """The vocabulary shards, each named by a stage of its rank, in order of their ranks; none
        without S."""
        if S not in self.ops:
            return ()
        by_rank = (
            {step.stage for step in order if step[0] == S and type(step) is Action}
            for order in self.orders
        )
        return tuple(stage for stages in by_rank for stage in sorted(stages))

    def weight_order(self, stage: int) -> tuple[int, ...]:
        """Returns the microbatches in the order in which the weight gradients of `stage`
        accumulate, copy by copy."""
        ranks = dict.fromkeys(self.placement.owners[stage])
        actions = (action for rank in ranks for action in flatten(self.orders[rank]))
        return tuple(
            action.microbatch
            for action in actions
            if action.op in (W, BW) and action.stage == stage
        )


def require_schedule(schedule: Any) -> None:
    """Raises `ScheduleError` unless `schedule` is one."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"received {schedule!r:.80}; expected a Schedule, such as `build` and `lower` make"
        )


Letters = Literal["papers", "torch"]

_FROM_TORCH = {torch: op for op, torch in TORCH_LETTERS.items()}
_PAPERS = re.compile(r"(?P<op>[A-Z]+(?:_[A-Z]+)?)(?P<stage>\d{1,9})\.(?P<microbatch>\d{1,9})")
_TORCH = re.compile(r"(?P<stage>\d{1,9})(?P<op>[A-Z]+(?:_[A-Z]+)?)(?P<microbatch>\d{1,9})")
_PAIR = re.compile(r"\(([^|()]+)\|([^|()]+)\)|\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def format_step(step: Step, letters: Letters = "papers") -> str:
    """Returns the text of one action or pair.

    >>> format_step(Action("B", 0, 3)), format_step(Action("B", 0, 3), "torch")
    ('B0.3', '0I3')
    >>> format_step(Pair(Action("F", 0, 1), Action("BW", 3, 0)), "torch")
    '(0F1;3B0)OVERLAP_F_B'
    """
    if letters == "papers":
        return str(step)
    if isinstance(step, Pair):
        return (
            f"({format_step(step.first, letters)};{format_step(step.second, letters)})OVERLAP_F_B"
        )
    if step.op not in TORCH_LETTERS:
        raise ScheduleError(f"{step}: torch has no letter for {step.op}; write .json")
    return f"{step.stage}{TORCH_LETTERS[step.op]}{step.microbatch}"


def parse_step(text: str) -> Step:
    """Returns the action or pair written in `text`, in either letters.

    >>> parse_step("0I3"), parse_step("(B1.3|W1.2)").second
    (Action(op='B', stage=0, microbatch=3), Action(op='W', stage=1, microbatch=2))
    """
    pair = _PAIR.fullmatch(text)
    return (
        Pair(*(_parse_action(half.strip()) for half in pair.groups() if half))
        if pair
        else _parse_action(text)
    )


def _parse_action(text: str) -> Action:
    papers, torch = _PAPERS.fullmatch(text), _TORCH.fullmatch(text)
    match = papers or torch
    op = "" if match is None else match["op"] if papers else _FROM_TORCH.get(match["op"], "")
    if match is None or op not in OPS:
        raise ScheduleError(
            f"{text!r:.80} is not an action such as F0.3, BW0.3, SEND_F0.3 or torch's 0F3, 0I3, 0B3"
        )
    return Action(op, int(match["stage"]), int(match["microbatch"]))


def format_order(order: Iterable[Step]) -> str:
    """Returns the steps of one rank, separated by blanks."""
    return " ".join(map(str, order))


def parse_order(text: str) -> tuple[Step, ...]:
    """Reads what `format_order` writes.

    >>> parse_order("F0.0 BW0.0") == parse_order("0F0 0B0")
    True
    """
    return tuple(parse_step(word) for word in text.split())


def format_schedule(schedule: Schedule, width: int | None = None) -> str:
    """Returns a grid, one line per rank, step under step.

    With `width` (characters of a terminal) the grid is folded into bands that fit.

    >>> from zbcompile.schedules import build
    >>> print(format_schedule(build("zb-h1", ranks=2, microbatches=2)))
    zb-h1: 2 ranks, 2 microbatches, linear placement, 1 chunk
    rank 0  F0.0  F0.1  B0.0  W0.0  B0.1  W0.1
    rank 1  F1.0  B1.0  F1.1  B1.1  W1.0  W1.1
    """
    require_schedule(schedule)
    placement, chunks, barriers = schedule.placement, schedule.placement.chunks, schedule.barriers
    kind = str(placement) if placement.kind == "map" else placement.kind
    title = f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} microbatches"
    title += f", {kind} placement, {chunks} chunk{'s' * (chunks != 1)}"
    title += f", {barriers} barriers" * (barriers != 1) + ", lookups" * schedule.lookups
    title += ", with messages" * schedule.is_lowered
    labels = [f"rank {rank}" for rank in range(len(schedule.orders))]
    label_width = max(map(len, labels), default=0)
    lines, rows = [title], [label.ljust(label_width) for label in labels]
    for column in zip_longest(*(map(str, order) for order in schedule.orders), fillvalue=""):
        column_width = max(map(len, column))
        used = len(rows[0])
        if label_width < used and width is not None and used + 2 + column_width > width:
            lines += [*map(str.rstrip, rows), ""]
            rows = [label.ljust(label_width) for label in labels]
        rows = [f"{row}  {c.ljust(column_width)}" for row, c in zip(rows, column, strict=True)]
    return "\n".join([*lines, *map(str.rstrip, rows)])


def compute_only(orders: Iterable[Iterable[Step]]) -> Orders:
    """Returns orders without their messages and collectives."""
    return tuple(tuple(step for step in order if step[0] not in COMMUNICATION) for order in orders)
