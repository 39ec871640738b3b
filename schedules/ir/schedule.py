"""A schedule is data: for every rank the order of its compute actions, where each stage lives, and its text form.

Text is read and written in the papers' letters and in torch's: `F0.3`, `B0.3`, `BW0.3` (operation, stage, microbatch)
or `0F3`, `0I3`, `0B3` (stage, operation, microbatch; torch's I is our B, its B our BW).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from operator import itemgetter
from typing import Any, ClassVar, Literal, NamedTuple

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import BW, COMMUNICATION, Action, B, Pair, S, Step, W, flatten
from zbcompile.schedules.ir.kinds import FARTHEST, KINDS
from zbcompile.schedules.ir.placement import Placement, require_count


class Picturable:
    """In notebooks it is a picture of its steps; those of a schedule take the times of `Costs`' defaults. The package
    says how in `picture`, because the room of pictures imports this one."""

    picture: ClassVar[Callable[[Any], str]]

    def _repr_html_(self) -> str:
        return type(self).picture(self)


class Way(NamedTuple):
    """From stage `source` straight to stage `target`, at least two behind it; `back` if gradients return."""

    source: int
    target: int
    back: bool

    def __str__(self) -> str:
        return f"{self.source}{'<' * self.back}>{self.target}"


def require_ways(ways: Iterable[Iterable[Any]], stages: int) -> tuple[Way, ...]:
    """Ways that were read from a file. Raises `ScheduleError` if these stages cannot have them."""
    found = tuple(Way(*way) for way in ways)
    for way in found:
        whole = type(way.source) is int and type(way.target) is int and type(way.back) is bool
        if not whole or not 0 <= way.source < way.target < stages or not 2 <= way.target - way.source <= FARTHEST:
            raise ScheduleError(f"way {tuple(way)!r:.80}: expected two stages of {stages}, 2 to {FARTHEST} apart")
    if len({way[:2] for way in found}) < len(found):
        raise ScheduleError("two ways between the same two stages; expected one")
    return tuple(sorted(found))


@dataclass(frozen=True)
class Schedule(Picturable):
    """`orders[rank]` is the tuple of that rank's actions (or pairs of them), compute only.

    If there are vocabulary passes, `barriers` says what the backward of the last stage waits for: S of every shard (1)
    or T of every shard (2). `lookups` says that the embedding is sharded too: the first stage receives the rows that
    all shards have looked up. `programs` are the orders with their messages, if they came with their messages placed:
    `lower` keeps them. `ways` are those of values that go straight to a stage which is not the next.
    """

    name: str
    placement: Placement
    microbatches: int
    orders: tuple[tuple[Step, ...], ...]
    barriers: int = 1
    lookups: bool = False
    programs: tuple[tuple[Step, ...], ...] = ()
    ways: tuple[Way, ...] = ()

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def stages(self) -> int:
        return self.placement.stages

    def __str__(self) -> str:
        """The grid of `format_schedule`, which `parse_schedule` reads back."""
        return format_schedule(self)

    def copy_of(self, microbatch: int) -> int:
        """The model copy that a microbatch runs through: 0, or 1 for the second half under `dual`."""
        return int(self.placement.kind == "dual" and microbatch >= self.microbatches // 2)

    def rank_of(self, stage: int, microbatch: int) -> int:
        return self.placement.rank(stage, self.copy_of(microbatch))

    def microbatches_of(self, stage: int, rank: int) -> Sequence[int]:
        """Those that run through `stage` on `rank`: all, or those of one model copy."""
        every = range(self.microbatches)
        return every if self.placement.kind != "dual" else [m for m in every if self.rank_of(stage, m) == rank]

    @cached_property
    def ops(self) -> frozenset[str]:
        """The letters of all its actions, those in pairs included."""
        found: set[str] = set()
        for order in self.orders:
            heads = set(map(itemgetter(0), order))  # of a pair: its forward
            found |= heads if heads <= KINDS.keys() else {action.op for action in flatten(order)}
        return frozenset(found)

    @cached_property
    def shards(self) -> tuple[int, ...]:
        """The vocabulary shards, each named by a stage of its rank, in order of their ranks; none without S."""
        if S not in self.ops:
            return ()
        found = ({step.stage for step in order if step[0] == S and isinstance(step, Action)} for order in self.orders)
        return tuple(stage for stages in found for stage in sorted(stages))

    def beside(self, op: str, stage: int) -> Counter[str]:
        """What runs together with the `op` passes of a stage, how often: "own W" in BW, "W1" in a pair, or "nothing".

        >>> from zbcompile.schedules import build
        >>> build("1f1b-overlap", ranks=1, microbatches=3).beside("F", 0)
        Counter({'BW0': 2, 'nothing': 1})
        """
        found: Counter[str] = Counter()
        for actions in (flatten((step,)) for order in self.orders for step in order):
            for action in actions:
                if action.stage == stage and op in (action.op, KINDS[action.op].event):
                    others = [f"{other.op}{other.stage}" for other in actions if other != action]
                    found["own W" if action.op == BW and op == B else "".join(others) or "nothing"] += 1
        return found

    def weight_order(self, stage: int) -> tuple[int, ...]:
        """The microbatches in the order in which the weight gradients of `stage` accumulate, model copy by copy."""
        ranks = dict.fromkeys((self.rank_of(stage, 0), self.rank_of(stage, self.microbatches - 1)))
        actions = (action for rank in ranks for action in flatten(self.orders[rank]))
        return tuple(action.microbatch for action in actions if action.op in (W, BW) and action.stage == stage)


@dataclass(frozen=True)
class Lowered(Picturable):
    """A schedule with its communication: `programs[rank]` is the order with SEND and RECV actions placed in it.

    Execution semantics, which `check` proves safe and every runtime must keep: a RECV posts a receive and returns; a
    compute action waits for the receives it needs; a SEND may block until the matching receive is posted. On every
    channel (ordered pair of ranks) receives are posted in the order in which the peer sends.
    """

    schedule: Schedule
    programs: tuple[tuple[Step, ...], ...]

    def __str__(self) -> str:
        """The grid of a schedule, with its messages."""
        return format_schedule(self)

    def as_schedule(self) -> Schedule:
        """The schedule from which `lower` makes this program."""
        return replace(self.schedule, programs=self.programs)


def parts(program: Schedule | Lowered) -> tuple[Schedule, tuple[tuple[Step, ...], ...]]:
    """The schedule, and what its ranks run."""
    if isinstance(program, Lowered):
        return program.schedule, program.programs
    if not isinstance(program, Schedule):
        raise ScheduleError(
            f"received {program!r:.80}; expected a Schedule or a Lowered, such as `build` and `lower` make"
        )
    return program, program.orders


Letters = Literal["papers", "torch"]

TORCH_LETTERS = {op: kind.torch for op, kind in KINDS.items() if kind.torch}
_FROM_TORCH = {theirs: ours for ours, theirs in TORCH_LETTERS.items()}
_PAPERS = re.compile(r"([A-Z]+(?:\d{0,9}_[FB])?)(\d{1,9})\.(\d{1,9})")
_TORCH = re.compile(r"(\d{1,9})([A-Z]+(?:_[FB])?)(\d{1,9})")
_PAPERS_PAIR = re.compile(r"\(([^|()]+)\|([^|()]+)\)")
_TORCH_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
_HEADER = re.compile(
    r"(\S+): (\d{1,9}) ranks, (\d{1,9}) microbatches, (\w+(?::[\d,]+)?) placement, (\d{1,9}) chunks?"
    r"(?:, ([12]) barriers)?(, lookups)?(?:, straight ([\d<> ]+))?(, lowered)?"
)


def format_step(step: Step, letters: Letters = "papers") -> str:
    """One action or pair.

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
    """The action or pair written in `text`, in either letters.

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
    if op not in KINDS:
        raise ScheduleError(f"{text!r:.80} is not an action such as F0.3, BW0.3, SEND_F0.3 or torch's 0F3, 0I3, 0B3")
    return Action(op, int(stage), int(microbatch))


def format_order(order: Iterable[Step], letters: Letters = "papers") -> str:
    """The steps of one rank, separated by blanks."""
    return " ".join(format_step(step, letters) for step in order)


def parse_order(text: str) -> tuple[Step, ...]:
    """Read what `format_order` writes.

    >>> parse_order("F0.0 BW0.0") == parse_order("0F0 0B0")
    True
    """
    return tuple(parse_step(word) for word in text.split())


def format_schedule(program: Schedule | Lowered, letters: Letters = "papers", width: int | None = None) -> str:
    """A grid, one line per rank, step under step; `parse_schedule` reads it back.

    With `width` (characters of a terminal) the grid is folded into bands that fit.

    >>> from zbcompile.schedules import build
    >>> print(format_schedule(build("zb-h1", ranks=2, microbatches=2)))
    zb-h1: 2 ranks, 2 microbatches, linear placement, 1 chunk
    rank 0  F0.0  F0.1  B0.0  W0.0  B0.1  W0.1
    rank 1  F1.0  B1.0  F1.1  B1.1  W1.0  W1.1
    """
    schedule, orders = parts(program)
    cells = [[format_step(step, letters) for step in order] for order in orders]
    labels = [f"rank {rank}".ljust(len(f"rank {len(orders) - 1}")) for rank in range(len(orders))]
    lines = [_header(schedule, isinstance(program, Lowered))]
    for band in _bands(_columns(cells), len(labels[0]), width):
        rows = zip(*band, strict=True)
        lines += ["  ".join((label, *row)).rstrip() for label, row in zip(labels, rows, strict=True)]
        lines.append("")
    return "\n".join(lines[:-1])


def _header(schedule: Schedule, lowered: bool) -> str:
    placement, chunks = schedule.placement, schedule.placement.chunks
    kind = str(placement) if placement.kind == "map" else placement.kind
    counts = f"{schedule.ranks} ranks, {schedule.microbatches} microbatches"
    plural = "" if chunks == 1 else "s"
    barriers = f", {schedule.barriers} barriers" * (schedule.barriers != 1)
    lookups = ", lookups" * schedule.lookups
    straight = f", straight {' '.join(map(str, schedule.ways))}" * bool(schedule.ways)
    what = f"{schedule.name}: {counts}, {kind} placement, {chunks} chunk{plural}{barriers}{lookups}{straight}"
    return what + ", lowered" * lowered


def _columns(cells: Sequence[Sequence[str]]) -> list[list[str]]:
    columns = zip_longest(*cells, fillvalue="")
    return [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]


def _bands(columns: list[list[str]], label: int, width: int | None) -> list[list[list[str]]]:
    """Split columns so that label, two blanks and cell after cell fit into `width`; at least one column a band."""
    bands: list[list[list[str]]] = [[]]
    used = label
    for column in columns:
        used += 2 + len(column[0])
        if width is not None and used > width and bands[-1]:
            bands.append([])
            used = label + 2 + len(column[0])
        bands[-1].append(column)
    return bands


def parse_schedule(text: str) -> Schedule | Lowered:
    """Read what `format_schedule` writes, folded or not.

    A lowered program comes back with its compute actions as the orders of its schedule. Only the form is judged here;
    `check` judges the content.
    """
    header, *lines = [line for line in text.splitlines() if line.strip()] or [""]
    match = _HEADER.fullmatch(header.strip())
    if not match:
        expected = "NAME: P ranks, M microbatches, KIND placement, V chunks"
        raise ScheduleError(f"first line {header!r:.80}; expected {expected!r}")
    name, ranks, microbatches, kind, chunks, barriers, lookups, straight, lowered = match.groups()
    known = kind.startswith("map:")
    programs = _rows(lines, int(ranks))
    placement = Placement.parse(kind, int(ranks)) if known else Placement(kind, int(ranks), int(chunks))
    orders, passes = compute_only(programs), (int(barriers or 1), lookups is not None)
    require_counts(placement, int(microbatches), orders)
    schedule = Schedule(name, placement, int(microbatches), orders, *passes)
    if straight:
        schedule = replace(schedule, ways=require_ways(map(_parse_way, straight.split()), schedule.stages))
    return Lowered(schedule, programs) if lowered else schedule


def _parse_way(text: str) -> tuple[int, int, bool]:
    match = re.fullmatch(r"(\d{1,9})(<?)>(\d{1,9})", text)
    if not match:
        raise ScheduleError(f"way {text!r:.80}; expected SOURCE>TARGET, or SOURCE<>TARGET if gradients return")
    return int(match[1]), int(match[3]), bool(match[2])


def _rows(lines: Sequence[str], ranks: int) -> tuple[tuple[Step, ...], ...]:
    """The text of every rank in a grid; fewer rows than ranks if lines are missing."""
    orders: dict[int, list[Step]] = {}
    for line in lines:
        word, rank, *steps = (*line.split(), "")
        if word != "rank" or not re.fullmatch(r"[0-9]{1,9}", rank) or int(rank) >= ranks:
            raise ScheduleError(f"line {line!r:.80}; expected 'rank R' with R from 0 to {ranks - 1} and its steps")
        orders.setdefault(int(rank), []).extend(map(parse_step, filter(None, steps)))
    return tuple(tuple(orders.get(rank, ())) for rank in range(min(ranks, len(lines))))


def require_counts(placement: Placement, microbatches: int, orders: Sequence[Sequence[Step]]) -> None:
    """Refuse counts that exceed the number of actions, before memory is allocated for them."""
    require_count("microbatches", microbatches)
    actions = len(orders) + sum(map(len, orders)) * 2
    if placement.ranks != len(orders) or max(placement.stages, microbatches) > actions:
        counts = f"{placement.ranks} ranks with {placement.chunks} chunks and {microbatches} microbatches"
        raise ScheduleError(f"{counts}, but orders of {len(orders)} ranks with at most {actions} actions")


def compute_only(programs: Iterable[Iterable[Step]]) -> tuple[tuple[Step, ...], ...]:
    """Programs without their SEND and RECV actions."""
    return tuple(tuple(step for step in program if step[0] not in COMMUNICATION) for program in programs)
