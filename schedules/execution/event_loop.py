"""Runs the orders of all ranks against each other: the one loop under `lower`, `check` and `simulate`.

Every action waits for one event and makes one event. Ranks share nothing but events and each event has one maker, so
whether the ranks finish, and when, does not depend on who is asked first (a Kahn network): a run that finishes IS a
proof that the orders cannot deadlock, a run that does not finish shows who waits for whom.

Events are integers so that they index a flat list: one band of stages x microbatches events per kind of operation.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import (
    BW,
    CAST,
    LOOKUP,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    SPREAD,
    STATS,
    SUM,
    Action,
    B,
    F,
    Pair,
    S,
    Step,
    T,
    W,
)
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.schedule import Lowered, Schedule

BANDS = (F, B, RECV_F, RECV_B, SEND_F, SEND_B, S, T, CAST, STATS, SUM, LOOKUP, SPREAD)
COMPUTE_BANDS, MESSAGE_BANDS = 2, 6


# What an operation on one stage does: it waits for event `need` + microbatch and `delay` more, takes `time` (`None`:
# part of a step that is timed elsewhere), makes event `make` + microbatch. A plain tuple unpacks ten times faster than
# a named one.
Row = tuple[int, float, float | None, int]  # need, delay, time, make
Rows = dict[Any, dict[int, Row]]  # by operation (or by a part of a pair), then by stage
Triple = tuple[Any, int, int]  # an action, or a part of a pair: key of rows, stage, microbatch


class Events(NamedTuple):
    """Numbers of events. The first `microbatches` of them have always happened, the last ones say nothing."""

    stages: int
    microbatches: int
    bands: int

    def first(self, op: str, stage: int) -> int:
        """The event of `op` on `stage` for microbatch 0; B and BW are the same event: the input gradient exists."""
        return (1 + BANDS.index(B if op == BW else op) * self.stages + stage) * self.microbatches

    def action(self, event: int) -> Action:
        """What makes `event`, with B for BW."""
        row, microbatch = divmod(event, self.microbatches)
        band, stage = divmod(row - 1, self.stages)
        return Action(BANDS[band], stage, microbatch)

    @property
    def nothing(self) -> int:
        return (1 + self.bands * self.stages) * self.microbatches


class Run(NamedTuple):
    """What happened: `begin[rank]` and `end[rank]` of every step that was run, and who stopped.

    `happened[event]` is a time or `None`; `blocked[rank]` is the event that a rank still waits for.
    """

    begin: list[list[Any]]
    end: list[list[Any]]
    happened: list[Any]
    blocked: Mapping[int, int]
    events: Events


def parts(program: Schedule | Lowered) -> tuple[Schedule, tuple[tuple[Step, ...], ...]]:
    """The schedule, and what its ranks run."""
    return (program.schedule, program.programs) if isinstance(program, Lowered) else (program, program.orders)


def has_pairs(order: Sequence[Step]) -> bool:
    return Pair in set(map(type, order))


def require_fit(program: Schedule | Lowered, costs: Costs) -> None:
    """Raise `ScheduleError` unless there is one order of actions and pairs per rank, and one cost per stage."""
    schedule, orders = parts(program)
    if len(orders) != schedule.ranks:
        raise ScheduleError(f"{schedule.name}: {len(orders)} orders for {schedule.ranks} ranks; give one each")
    for rank, order in enumerate(orders):
        if not set(map(type, order)) <= {Action, Pair}:
            index, step = next((i, step) for i, step in enumerate(order) if type(step) not in (Action, Pair))
            what = f"rank {rank}, step {index}: {step!r} is no action; expected Action(op, stage, microbatch) or a Pair"
            raise ScheduleError(f"{schedule.name}: {what}")
    if costs.stages != schedule.stages:
        hint = f"see costs.resized({schedule.stages})"
        raise ScheduleError(f"costs of {costs.stages} stages for {schedule.stages} stages of {schedule.name}; {hint}")


def run(program: Schedule | Lowered, costs: Costs) -> Run:
    """Run every rank until it is done or waits for what nobody makes any more.

    A schedule is run with messages buffered without limit, a lowered program with sends that wait for their receive.
    """
    require_fit(program, costs)
    schedule, orders = parts(program)
    shards = schedule.shards
    bands = len(BANDS) if shards else MESSAGE_BANDS if isinstance(program, Lowered) else COMPUTE_BANDS
    events = Events(schedule.stages, schedule.microbatches, bands)
    happened: list[Any] = [None] * (events.nothing + events.microbatches)
    happened[: events.microbatches] = [0] * events.microbatches
    begin: list[list[Any]] = [[] for _ in orders]
    end: list[list[Any]] = [[] for _ in orders]
    waiting: dict[int, list[int]] = {}
    ready = deque(reversed(range(schedule.ranks)))  # first come, first served: fewest changes from rank to rank
    routines = []
    for rank, order in enumerate(orders):
        rows = _rows(schedule, costs, events, rank, isinstance(program, Lowered))
        awaits = awaited(schedule, isinstance(program, Lowered)) if shards else {}
        triples = _triples(order, rows, costs, events, shards, awaits) if shards or has_pairs(order) else order
        routines.append(_rank(rank, triples, rows, begin[rank], end[rank], happened, waiting, ready))
    while ready:
        rank = ready.popleft()
        for need in routines[rank]:  # it yields when it has to wait; the maker of the event makes it ready again
            waiting.setdefault(need, []).append(rank)
            break
    blocked = {rank: need for need, ranks in waiting.items() for rank in ranks}
    return Run(begin, end, happened, blocked, events)


def _rank(
    rank: int,
    triples: Iterable[Any],
    rows: Rows,
    begin: list[Any],
    end: list[Any],
    happened: list[Any],
    waiting: dict[int, list[int]],
    ready: deque[int],
) -> Iterator[int]:
    """One rank; written for speed, everything that is not the common case is in `_triples`."""
    now: float = 0
    try:
        for op, stage, microbatch in triples:
            need, delay, time, make = rows[op][stage]
            arrival = happened[need + microbatch]
            if arrival is None:
                yield need + microbatch
                arrival = happened[need + microbatch]
            arrival += delay
            if arrival > now:
                now = arrival
            if time is not None:
                begin.append(now)
                now += time
                end.append(now)
            make += microbatch
            happened[make] = now
            if make in waiting:
                ready.extend(waiting.pop(make))
    except (KeyError, IndexError, TypeError, ValueError):
        raise ScheduleError(f"rank {rank}, step {len(begin)}: not this rank's to run; `check` shows what") from None


def awaited(schedule: Schedule, lowered: bool) -> dict[tuple[str, int], str]:
    """What of EVERY shard an operation on a stage waits for: the operation that makes it, or in a lowered program its
    collective, which is complete when every shard has posted it."""
    reduced = {1: (S, STATS), 2: (T, SUM)}[schedule.barriers][lowered]
    found = {(op, schedule.stages - 1): reduced for op in (B, BW)}
    found |= {(T, shard): STATS if lowered else S for shard in schedule.shards}
    if lowered:
        found |= {(S, shard): CAST for shard in schedule.shards}
    return found | {(F, 0): LOOKUP} if lowered and schedule.lookups else found


def _triples(
    order: Sequence[Step], rows: Rows, costs: Costs, events: Events, shards: Sequence[int], awaits: Mapping[Any, str]
) -> Iterator[Triple]:
    """An order with everything opened that waits for more than one event; adds what that needs to `rows`."""
    for step in order:
        for op, stage, microbatch in step if isinstance(step, Pair) else (step,):
            if (op, stage) in awaits:
                for shard in shards:
                    yield ("after", awaits[op, stage]), shard, microbatch
        if isinstance(step, Pair):
            yield from _pair_triples(step, rows, costs, events)
        else:
            yield step


def _pair_triples(pair: Pair, rows: Rows, costs: Costs, events: Events) -> Iterator[Triple]:
    """Both halves begin when both may and end together: wait for the forward's input, run both, note the forward."""
    (_, f_stage, f_microbatch), (b_op, b_stage, b_microbatch) = pair
    both = (f_stage, b_op)
    if b_stage not in rows.setdefault(both, {}):
        need, delay, _, make = rows[b_op][b_stage]
        rows[both][b_stage] = (need, delay, costs.pair_time(f_stage, b_stage, b_op), make)
    yield "may F", f_stage, f_microbatch
    yield both, b_stage, b_microbatch
    yield "did F", f_stage, f_microbatch


def _rows(schedule: Schedule, costs: Costs, events: Events, rank: int, lowered: bool) -> Rows:
    """What each operation waits for, takes and makes on this rank, for each of its stages."""
    rows: Rows = {op: {} for op in (*BANDS, BW, W, "may F", "did F")}
    nothing = events.nothing
    for stage in schedule.placement.stages_of(rank):
        for op in (F, B, BW):
            rows[op][stage] = _dependent_row(schedule, costs, events, rank, op, stage, lowered)
        rows[W][stage] = (events.first(B, stage), 0, costs.weight[stage], nothing)
        need, delay, _, _ = rows[F][stage]
        rows["may F"][stage] = (need, delay, None, nothing)
        rows["did F"][stage] = (0, 0, None, events.first(F, stage))
        if lowered:
            _add_message_rows(rows, events, stage)
        if events.bands == len(BANDS):
            _add_vocabulary_rows(rows, schedule, costs, events, rank, stage, lowered)
    if events.bands == len(BANDS):
        for op in (S, T, CAST, STATS, SUM, LOOKUP):
            delay = costs.cast_time if op in (CAST, LOOKUP) else costs.stats_time
            rows["after", op] = {s: (events.first(op, s), delay, None, nothing) for s in range(events.stages)}
    return rows


def _add_vocabulary_rows(
    rows: Rows, schedule: Schedule, costs: Costs, events: Events, rank: int, stage: int, lowered: bool
) -> None:
    """S waits for the last stage's output, T for S; a collective is posted after what it carries."""
    output = events.first(F, events.stages - 1)
    made_here = rank in {schedule.rank_of(events.stages - 1, m) for m in (0, events.microbatches - 1)}
    arrives = (0, 0) if lowered else (output, costs.cast_time)
    rows[S][stage] = (*arrives, costs.vocab_s[stage], events.first(S, stage))
    rows[T][stage] = (events.first(S, stage), 0, costs.vocab_t[stage], events.first(T, stage))
    rows[CAST][stage] = (output if made_here else 0, 0, 0, events.first(CAST, stage))
    rows[STATS][stage] = (events.first(S, stage), 0, 0, events.first(STATS, stage))
    rows[SUM][stage] = (events.first(T, stage), 0, 0, events.first(SUM, stage))
    rows[LOOKUP][stage] = (0, 0, 0, events.first(LOOKUP, stage))
    first_here = rank in {schedule.rank_of(0, m) for m in (0, events.microbatches - 1)}
    rows[SPREAD][stage] = (events.first(B, 0) if first_here else 0, 0, 0, events.first(SPREAD, stage))


def _dependent_row(
    schedule: Schedule, costs: Costs, events: Events, rank: int, op: str, stage: int, lowered: bool
) -> Row:
    """F waits for the stage before, B and BW for the stage behind: through a message where that is another rank."""
    neighbour = stage - 1 if op == F else stage + 1
    time, make = costs.time(op, stage), events.first(op, stage)
    if neighbour < 0:
        return (0, 0, time, make)
    if neighbour == schedule.stages:
        return (events.first(F, stage), 0, time, make)
    copy = int(schedule.placement.rank(stage) != rank)
    source = schedule.placement.rank(neighbour, copy)
    if source == rank:
        return (events.first(op, neighbour), 0, time, make)
    message = SEND_F if op == F else SEND_B
    need = events.first(message if lowered else op, neighbour)
    return (need, costs.hop(min(stage, neighbour), source, rank), time, make)


def _add_message_rows(rows: Rows, events: Events, stage: int) -> None:
    """A receive is posted and goes on; a send waits until the other side has posted (rendezvous)."""
    rows[RECV_F][stage] = (0, 0, 0, events.first(RECV_F, stage))
    rows[RECV_B][stage] = (0, 0, 0, events.first(RECV_B, stage))
    if stage + 1 < events.stages:
        rows[SEND_F][stage] = (events.first(RECV_F, stage + 1), 0, 0, events.first(SEND_F, stage))
    if stage > 0:
        rows[SEND_B][stage] = (events.first(RECV_B, stage - 1), 0, 0, events.first(SEND_B, stage))


P = ParamSpec("P")
R = TypeVar("R")


def without_collector(function: Callable[P, R]) -> Callable[P, R]:
    """Pause the collector while `function` runs: for functions that make no reference cycles.

    Halves the time of `lower` on 200,000 actions; the collector is left as it was found.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if enabled:
                gc.enable()

    return run
