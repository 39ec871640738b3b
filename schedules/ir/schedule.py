"""A schedule is data: for every rank the order of its actions, and where each stage lives; and its printed form.

Actions are written in the papers' letters or in torch's: `F0.3`, `B0.3`, `BW0.3` (operation, stage, microbatch) or
`0F3`, `0I3`, `0B3` (stage, operation, microbatch; torch's I is our B, its B our BW).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from operator import itemgetter
from typing import Any, ClassVar, Literal

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import BW, COMMUNICATION, Action, B, Pair, S, Step, W, flatten
from zbcompile.schedules.ir.kinds import OPS, TORCH_LETTERS, result_of
from zbcompile.schedules.ir.placement import Placement, require_count

Orders = tuple[tuple[Step, ...], ...]


class Picturable:
    """In notebooks it is a picture of its steps; those of a schedule take the times of `Costs`' defaults. The package
    says how in `picture`, because the room of pictures imports this one."""

    picture: ClassVar[Callable[[Any], str]]

    def _repr_html_(self) -> str:
        return type(self).picture(self)


@dataclass(frozen=True)
class Schedule(Picturable):
    """`orders[rank]` is the tuple of that rank's actions, or pairs of them.

    `lower` adds the messages. Execution semantics of a schedule with messages, which `check` proves safe and every
    runtime must keep: a RECV posts a receive and returns; a compute action waits for the receives it needs; a SEND may
    block until the matching receive is posted. On every channel (ordered pair of ranks) receives are posted in the
    order in which the peer sends.

    If there are vocabulary passes, `barriers` says what the backward of the last stage waits for: S of every shard (1)
    or T of every shard (2). `lookups` says that the embedding is sharded too: the first stage receives the rows that
    all shards have looked up.
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
        """Whether the orders have messages or collectives."""
        return not self.ops.isdisjoint(COMMUNICATION)

    def compute_only(self) -> "Schedule":
        """Returns the schedule without its messages and collectives."""
        return self._compute_only if self.is_lowered else self

    @cached_property
    def _compute_only(self) -> "Schedule":
        return replace(self, orders=compute_only(self.orders))

    def copy_of(self, microbatch: int) -> int:
        """Returns the model copy that a microbatch runs through: 0, or 1 for the second half under `dual`."""
        return int(self.placement.kind == "dual" and microbatch >= self.microbatches // 2)

    def rank_of(self, stage: int, microbatch: int) -> int:
        return self.placement.rank(stage, self.copy_of(microbatch))

    def microbatches_of(self, stage: int, rank: int) -> Sequence[int]:
        """Returns those that run through `stage` on `rank`: all, or those of one model copy."""
        every = range(self.microbatches)
        return every if self.placement.kind != "dual" else [m for m in every if self.rank_of(stage, m) == rank]

    @cached_property
    def ops(self) -> frozenset[str]:
        """The letters of all its actions, those in pairs included."""
        found: set[str] = set()
        for order in self.orders:
            heads = set(map(itemgetter(0), order))  # of a pair: its forward
            found |= heads if heads <= OPS else {action.op for action in flatten(order)}
        return frozenset(found)

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """The vocabulary shards, each named by a stage of its rank, in order of their ranks; none without S."""
        if S not in self.ops:
            return ()
        found = ({step.stage for step in order if step[0] == S and isinstance(step, Action)} for order in self.orders)
        return tuple(stage for stages in found for stage in sorted(stages))

    def beside(self, op: str, stage: int) -> Counter[str]:
        """Counts what runs together with the `op` passes of a stage: "own W" in BW, "W1" in a pair, or "nothing".

        >>> from zbcompile.schedules import build
        >>> build("1f1b-overlap", ranks=1, microbatches=3).beside("F", 0)
        Counter({'BW0': 2, 'nothing': 1})
        """
        found: Counter[str] = Counter()
        for actions in (flatten((step,)) for order in self.orders for step in order):
            for action in actions:
                if action.stage == stage and op in (action.op, result_of(action.op)):
                    others = [f"{other.op}{other.stage}" for other in actions if other != action]
                    found["own W" if action.op == BW and op == B else "".join(others) or "nothing"] += 1
        return found

    def weight_order(self, stage: int) -> tuple[int, ...]:
        """Returns the microbatches in the order in which the weight gradients of `stage` accumulate, copy by copy."""
        ranks = dict.fromkeys((self.rank_of(stage, 0), self.rank_of(stage, self.microbatches - 1)))
        actions = (action for rank in ranks for action in flatten(self.orders[rank]))
        return tuple(action.microbatch for action in actions if action.op in (W, BW) and action.stage == stage)


def require_schedule(schedule: Any) -> None:
    """Raises `ScheduleError` unless `schedule` is one."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"received {schedule!r:.80}; expected a Schedule, such as `build` and `lower` make")


Letters = Literal["papers", "torch"]

_FROM_TORCH = {theirs: ours for ours, theirs in TORCH_LETTERS.items()}
_PAPERS = re.compile(r"([A-Z]+(?:\d{0,9}_[FB])?)(\d{1,9})\.(\d{1,9})")
_TORCH = re.compile(r"(\d{1,9})([A-Z]+(?:_[FB])?)(\d{1,9})")
_PAPERS_PAIR = re.compile(r"\(([^|()]+)\|([^|()]+)\)")
_TORCH_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


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
        return f"({format_step(step.first, letters)};{format_step(step.second, letters)})OVERLAP_F_B"
    if step.op not in TORCH_LETTERS:
        raise ScheduleError(f"{step}: torch has no letter for {step.op}; write it in the papers' letters")
    return f"{step.stage}{TORCH_LETTERS[step.op]}{step.microbatch}"


def parse_step(text: str) -> Step:
    """Returns the action or pair written in `text`, in either letters.

    >>> parse_step("0I3"), parse_step("(B1.3|W1.2)").second
    (Action(op='B', stage=0, microbatch=3), Action(op='W', stage=1, microbatch=2))
    """
    pair = text.startswith("(") and (_PAPERS_PAIR.fullmatch(text) or _TORCH_PAIR.fullmatch(text))
    if pair:
        return Pair(_parse_action(pair[1].strip()), _parse_action(pair[2].strip()))
    return _parse_action(text)


def _parse_action(text: str) -> Action:
    if match := _PAPERS.fullmatch(text):
        op, stage, microbatch = match.groups()
    elif match := _TORCH.fullmatch(text):
        stage, letter, microbatch = match.groups()
        op = _FROM_TORCH.get(letter, "")
    else:
        op, stage, microbatch = "", "0", "0"
    if op not in OPS:
        raise ScheduleError(f"{text!r:.80} is not an action such as F0.3, BW0.3, SEND_F0.3 or torch's 0F3, 0I3, 0B3")
    return Action(op, int(stage), int(microbatch))


def format_order(order: Iterable[Step], letters: Letters = "papers") -> str:
    """Returns the steps of one rank, separated by blanks."""
    return " ".join(format_step(step, letters) for step in order)


def parse_order(text: str) -> tuple[Step, ...]:
    """Reads what `format_order` writes.

    >>> parse_order("F0.0 BW0.0") == parse_order("0F0 0B0")
    True
    """
    return tuple(parse_step(word) for word in text.split())


def format_schedule(schedule: Schedule, letters: Letters = "papers", width: int | None = None) -> str:
    """Returns a grid, one line per rank, step under step.

    With `width` (characters of a terminal) the grid is folded into bands that fit.

    >>> from zbcompile.schedules import build
    >>> print(format_schedule(build("zb-h1", ranks=2, microbatches=2)))
    zb-h1: 2 ranks, 2 microbatches, linear placement, 1 chunk
    rank 0  F0.0  F0.1  B0.0  W0.0  B0.1  W0.1
    rank 1  F1.0  B1.0  F1.1  B1.1  W1.0  W1.1
    """
    require_schedule(schedule)
    labels = [f"rank {rank}" for rank in range(len(schedule.orders))]
    cells = [[format_step(step, letters) for step in order] for order in schedule.orders]
    columns = list(zip_longest(*cells, fillvalue=""))
    label_width = max(map(len, labels), default=0)
    lines, used = [_header(schedule)], width or 0
    rows: list[str] = []
    for column in columns:
        room = 2 + max(map(len, column))
        if not rows or (width is not None and used + room > width):
            lines += [*(row.rstrip() for row in rows), ""] if rows else []
            rows, used = [label.ljust(label_width) for label in labels], label_width
        rows = [f"{row}  {cell.ljust(room - 2)}" for row, cell in zip(rows, column, strict=True)]
        used += room
    return "\n".join([*lines, *(row.rstrip() for row in rows or labels)])


def _header(schedule: Schedule) -> str:
    placement, chunks = schedule.placement, schedule.placement.chunks
    kind = str(placement) if placement.kind == "map" else placement.kind
    counts = f"{schedule.ranks} ranks, {schedule.microbatches} microbatches"
    plural = "" if chunks == 1 else "s"
    notes = [f"{schedule.barriers} barriers"] * (schedule.barriers != 1) + ["lookups"] * schedule.lookups
    notes += ["with messages"] * schedule.is_lowered
    return ", ".join([f"{schedule.name}: {counts}, {kind} placement, {chunks} chunk{plural}", *notes])


def require_counts(placement: Placement, microbatches: int, orders: Sequence[Sequence[Step]]) -> None:
    """Refuses counts that exceed the number of actions, before memory is allocated for them."""
    require_count("microbatches", microbatches)
    actions = len(orders) + sum(map(len, orders)) * 2
    if placement.ranks != len(orders) or max(placement.stages, microbatches) > actions:
        counts = f"{placement.ranks} ranks with {placement.chunks} chunks and {microbatches} microbatches"
        raise ScheduleError(f"{counts}, but orders of {len(orders)} ranks with at most {actions} actions")


def compute_only(orders: Iterable[Iterable[Step]]) -> Orders:
    """Returns orders without their messages and collectives."""
    return tuple(tuple(step for step in order if step[0] not in COMMUNICATION) for order in orders)
