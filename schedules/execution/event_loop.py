"""Runs the orders of all ranks against each other: the one loop under `lower`, `check` and `simulate`.

Every action waits for one event and makes one event. Ranks share nothing but events, and each event has one maker, so
whether and when the ranks finish does not depend on the order in which they are visited (a Kahn network). A run that
finishes is therefore a proof that the orders cannot deadlock; one that does not shows which rank waits for which.

Events are integers so that they index a flat list: one band of stages x microbatches events per kind of operation.
"""

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, takewhile
from typing import Any, NamedTuple

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import (
    COLLECTIVES,
    COMPUTE,
    EXCHANGES,
    FETCH,
    ONCE,
    PAIRED,
    Action,
    Pair,
    Step,
    W,
    has_pairs,
)
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.dependencies import (
    SEND_OF,
    awaited,
    messages_of,
    needs,
    other_end,
    receives_before,
    source,
    target,
)
from zbcompile.schedules.ir.kinds import KINDS, Kind
from zbcompile.schedules.ir.schedule import Lowered, Schedule, parts


def _awaits(kind: Kind) -> tuple[str, ...]:
    """The operation that a kind waits for. None for kinds of scope "stage": their predecessors have run on the same
    rank."""
    return (kind.takes,) if kind.scope == "stage" else (*kind.after, kind.takes)


# Operations that others wait for, and that therefore have events: nothing waits for W unless a kind in the table does.
WAITED_FOR = tuple(
    op
    for op, kind in KINDS.items()
    if kind.role != "compute"
    or (kind.event == op and (kind.along or any(op in _awaits(other) for other in KINDS.values())))
)

# What an operation on one stage does: it waits for event `need` + microbatch and `delay` more, takes `time` (`None`:
# part of a step that is timed elsewhere), makes event `make` + microbatch. A plain tuple unpacks ten times faster than
# a named one.
Row = tuple[int, float, float | None, int]  # need, delay, time, make
Rows = dict[Any, dict[int, Row]]  # by operation (or by a part of a pair), then by stage
Triple = tuple[Any, int, int]  # an action, or a part of a pair: key of rows, stage, microbatch


class Events(NamedTuple):
    """Numbers events. Each stage has one per microbatch for every kind, or one per gather if it gathers more often than
    that. The first ones count as happened from the start; nothing waits for the last ones."""

    stages: int
    microbatches: int
    bands: tuple[str, ...]

    def first(self, op: str, stage: int) -> int:
        """The event of `op` on `stage` for microbatch 0; B and BW are the same event: the input gradient exists."""
        return (1 + self.bands.index(KINDS[op].event) * self.stages + stage) * self.microbatches

    def action(self, event: int) -> Action:
        """What makes `event`, with B for BW."""
        row, microbatch = divmod(event, self.microbatches)
        band, stage = divmod(row - 1, self.stages)
        return Action(self.bands[band], stage, microbatch)

    @property
    def nothing(self) -> int:
        return (1 + len(self.bands) * self.stages) * self.microbatches


class Outcome(NamedTuple):
    """What happened in a run: `begin[rank]` and `end[rank]` of every step that was run, and who stopped.

    `happened[event]` is a time or `None`; `blocked[rank]` is the event that a rank still waits for.
    """

    begin: list[list[Any]]
    end: list[list[Any]]
    happened: list[Any]
    blocked: Mapping[int, int]
    events: Events


def operations(program: Schedule | Lowered) -> frozenset[str]:
    """The letters of the actions that a program may have."""
    schedule, _ = parts(program)
    communication = messages_of(schedule) | (COLLECTIVES if schedule.shards else frozenset())
    return schedule.ops & KINDS.keys() | (communication | exchanges(program) if isinstance(program, Lowered) else set())


def exchanges(program: Schedule | Lowered) -> frozenset[str]:
    """The exchanges at both ends of a lowered program."""
    first = program.programs[0] if isinstance(program, Lowered) and program.programs else ()
    ends = chain.from_iterable(takewhile(lambda step: step[0] in EXCHANGES, s) for s in (first, reversed(first)))
    return frozenset(str(step[0]) for step in ends)


def require_fit(program: Schedule | Lowered, costs: Costs) -> None:
    """Raise `ScheduleError` unless there is one order of actions and pairs per rank, and one cost per stage."""
    schedule, orders = parts(program)
    if len(orders) != schedule.ranks:
        raise ScheduleError(f"{schedule.name}: {len(orders)} orders for {schedule.ranks} ranks; expected one per rank")
    for rank, order in enumerate(orders):
        if not set(map(type, order)) <= {Action, Pair}:
            index, step = next((i, step) for i, step in enumerate(order) if type(step) not in (Action, Pair))
            what = f"{step!r} is not a step; expected Action(op, stage, microbatch) or a Pair"
            raise ScheduleError(f"{schedule.name}: rank {rank}, step {index}: {what}")
    if costs.stages != schedule.stages:
        hint = f"see costs.resized({schedule.stages})"
        raise ScheduleError(f"costs of {costs.stages} stages for {schedule.stages} stages of {schedule.name}; {hint}")


def run(program: Schedule | Lowered, costs: Costs) -> Outcome:
    """Run every rank until it is done or waits for an event that will never happen.

    A schedule is run with messages buffered without limit, a lowered program with sends that wait for their receive.
    """
    require_fit(program, costs)
    schedule, orders = parts(program)
    lowered, ops = isinstance(program, Lowered), operations(program)
    known = (op for op in WAITED_FOR if schedule.shards or KINDS[op].scope != "shard")
    bands = tuple(op for op in known if op in ops or op in COMPUTE - ONCE)  # what has events when these operations run
    events = Events(schedule.stages, _most_of_one_kind(schedule), bands)
    happened: list[Any] = [None] * (events.nothing + events.microbatches)
    happened[: events.microbatches] = [0] * events.microbatches
    begin: list[list[Any]] = [[] for _ in orders]
    end: list[list[Any]] = [[] for _ in orders]
    waiting: dict[int, list[int]] = {}
    ready = deque(reversed(range(schedule.ranks)))  # first come, first served: fewest changes from rank to rank
    times = {op: costs.times(op) for op in ops & COMPUTE}
    awaits = awaited(schedule, lowered) if schedule.shards else {}
    far = _far_receives(schedule) if lowered and schedule.ways else {}
    make_rows = _RowsOf(schedule, costs, times, events, lowered, ops, awaits, far)
    several = awaits or far or not ops.isdisjoint(EXCHANGES)
    routines = []
    for rank, order in enumerate(orders):
        rows = make_rows.of_rank(rank)
        triples: Iterable[Any] = _triples(order, rows, make_rows) if several or has_pairs(order) else order
        routines.append(_rank(rank, triples, rows, begin[rank], end[rank], happened, waiting, ready))
    while ready:
        rank = ready.popleft()
        for need in routines[rank]:  # it yields when it has to wait; the maker of the event makes it ready again
            waiting.setdefault(need, []).append(rank)
            break
    blocked = {rank: need for need, ranks in waiting.items() for rank in ranks}
    return Outcome(begin, end, happened, blocked, events)


def _most_of_one_kind(schedule: Schedule) -> int:
    """The most actions of one kind on a stage: one per microbatch or, if those are more, one per gather."""
    gathers = (step[2] + 1 for order in schedule.orders for step in order if step[0] == FETCH)
    return max(schedule.microbatches, *gathers) if FETCH in schedule.ops else schedule.microbatches


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
    """Runs one rank. Written for speed: everything but the common case is in `_triples`."""
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
        raise ScheduleError(f"rank {rank}, step {len(begin)}: not a step of this rank; `check` says why") from None


Awaits = Mapping[tuple[str, int], str]  # what of every shard an operation on a stage waits for
Far = Mapping[tuple[str, int], tuple[str, ...]]  # the messages from other stages than the next


def _far_receives(schedule: Schedule) -> Far:
    every = ((op, stage) for op in schedule.ops & COMPUTE for stage in range(schedule.stages))
    found = {key: tuple(r for r in receives_before(schedule, *key) if KINDS[r].hops > 1) for key in every}
    return {key: receives for key, receives in found.items() if receives}


def _triples(order: Sequence[Step], rows: Rows, made: "_RowsOf") -> Iterator[Triple]:
    """The order, with every action that waits for more than one event split into several; adds their entries to
    `rows`."""
    for step in order:
        for op, stage, microbatch in step if isinstance(step, Pair) else (step,):
            if (op, stage) in made.awaits:
                for shard in made.schedule.shards:
                    yield ("after", made.awaits[op, stage]), shard, microbatch
            for receive in made.far.get((op, stage), ()):
                yield ("after", receive), stage, microbatch
        if isinstance(step, Pair):
            yield from _pair_triples(step, rows, made.costs)
        else:
            yield step
        if step[0] in EXCHANGES:
            yield from ((("after", step[0]), rank, 0) for rank in range(made.schedule.ranks))


def _pair_triples(pair: Pair, rows: Rows, costs: Costs) -> Iterator[Triple]:
    """Both halves begin when both may and end together: wait for the first one's input, run both, note the first. A W
    needs nothing from elsewhere, and its B may be the first half."""
    (op, stage, microbatch), (other_op, other_stage, other_microbatch) = pair
    both = (op, stage, other_op)
    if other_stage not in rows.setdefault(both, {}):
        need, delay, _, make = rows[other_op][other_stage]
        entrance = (0, 0) if other_op == W else (need, delay)
        rows[both][other_stage] = (*entrance, costs.pair_time(stage, other_stage, other_op, op), make)
    yield f"may {op}", stage, microbatch
    yield both, other_stage, other_microbatch
    yield f"did {op}", stage, microbatch


class _RowsOf(NamedTuple):
    """The event that each operation waits for, its time, and the event that it makes, from the table of kinds."""

    schedule: Schedule
    costs: Costs
    times: Mapping[str, Sequence[float]]
    events: Events
    lowered: bool
    ops: frozenset[str]
    awaits: Awaits
    far: Far

    def of_rank(self, rank: int) -> Rows:
        """The rows of a rank: one for each operation of the program on each stage."""
        stages = self.schedule.placement.stages_of(rank)
        rows: Rows = {op: {s: self._row(rank, op, s) for s in stages} for op in self.ops.difference(EXCHANGES)}
        for op in self.ops.intersection(EXCHANGES):  # named by the rank
            every = range(self.schedule.ranks)
            rows[op] = {rank: (0, 0, self.costs.delay(op), self.events.first(op, rank))}
            rows["after", op] = {r: (self.events.first(op, r), 0, None, self.events.nothing) for r in every}
        for op in self.ops & {first for first, _ in PAIRED}:
            entrances = {stage: row[:2] for stage, row in rows[op].items()}
            rows[f"may {op}"] = {stage: (*entrance, None, self.events.nothing) for stage, entrance in entrances.items()}
            rows[f"did {op}"] = {stage: (0, 0, None, self.events.first(op, stage)) for stage in stages}
        for op in set(self.awaits.values()):
            delay, every = self.costs.delay(op), range(self.events.stages)
            rows["after", op] = {s: (self.events.first(op, s), delay, None, self.events.nothing) for s in every}
        for (_, stage), receives in self.far.items():
            for op in receives if stage in stages else ():
                rows.setdefault(("after", op), {})[stage] = self._arrival(rank, op, stage)
        return rows

    def _arrival(self, rank: int, receive: str, stage: int) -> Row:
        """The arrival of a value from a stage that is not a neighbour; at once if it was made on this rank."""
        at = source(receive, stage, self.events.stages)
        assert at is not None
        there = self.schedule.placement.rank_beside(rank, stage, at)
        if there == rank:
            return (0, 0, None, self.events.nothing)
        sent = self.events.first(other_end(receive), at)
        return (sent, self.costs.hop(min(stage, at), there, rank), None, self.events.nothing)

    def _row(self, rank: int, op: str, stage: int) -> Row:
        kind, events = KINDS[op], self.events
        make = events.first(op, stage) if kind.event in events.bands else events.nothing
        if kind.role == "compute":
            return (*self._entrance(rank, op, stage), self.times[op][stage], make)
        if kind.role == "send":  # it waits until the other side has posted its receive
            there = target(op, stage, events.stages)
            return (0 if there is None else events.first(other_end(op), there), 0, 0, make)
        made = needs(op, stage, events.stages) if kind.role == "collective" else ()
        count = self.schedule.microbatches
        here = [n for n in made if rank in {self.schedule.rank_of(n.stage, m) for m in (0, count - 1)}]
        return (events.first(*here[0]) if here else 0, 0, 0, make)

    def _entrance(self, rank: int, op: str, stage: int) -> tuple[int, float]:
        """The event that a pass waits for, and how long its message travels if it comes from another rank."""
        kind = KINDS[op]
        if kind.scope == "stage":  # the rest `check` has seen before it on its rank
            if kind.takes in self.ops:
                return (self.events.first(kind.takes, stage), self.costs.delay(kind.takes, stage))
            return (0, self.costs.delay(op, stage) if kind.before else 0)
        needed = needs(op, stage, self.events.stages)
        if not needed or (kind.made_at and self.lowered):
            return (0, 0)  # nothing, or a collective (`awaits`)
        other, at = needed[-1]
        if kind.made_at:
            return (self.events.first(other, at), self.costs.delay(other))
        there = self.schedule.placement.rank_beside(rank, stage, at)
        if there == rank:
            return (self.events.first(other, at), 0)
        need = self.events.first(SEND_OF[other] if self.lowered else other, at)
        return (need, self.costs.hop(min(stage, at), there, rank))


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause the collector: for functions that make no reference cycles, which this also decorates.

    Halves the time of `lower` on 200,000 actions; the collector is left as it was found.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
