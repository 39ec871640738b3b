"""The graph of an order: what every step waits for, and the longest-path run that times it.

A node is a step of a rank: an action, or a pair of actions that run together. Its rank runs it after the step before
it. Further inputs are results of the same rank, messages of other ranks, and barriers over the vocabulary shards,
which are nodes without a rank. In a lowered schedule a SEND also waits until its receive is posted, so a graph that
runs to its end cannot deadlock, in whatever order the ranks proceed.

The simulator, idle causes, critical path, deadlock text, `check` and `lower` read this graph.
"""

import gc
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import BW, COLLECTIVES, COMPUTE, EXCHANGES, SENDS, Action, B, Pair, S, Step, W
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.dependencies import (
    SEND_OF,
    awaited,
    needs,
    other_end,
    target,
)
from zbcompile.schedules.ir.kinds import COMPUTE_OPS, MESSAGE_OPS, OPS
from zbcompile.schedules.ir.schedule import Schedule, require_schedule

MISSING = -1  # the node of an action that no rank runs


class EdgeKind(NamedTuple):
    """Why a node waits for another: decides how long the result travels.

    `kind` is "local" (the same rank, no delay), "message" (across the boundary behind `stage`), "shards" (a collective
    of the vocabulary shards) or "rendezvous" (until a receive is posted; no delay).
    """

    kind: str
    stage: int = 0
    source: int = 0
    destination: int = 0

    def delay(self, costs: Costs) -> float:
        """Returns the time from the end of the input until it can be used."""
        if self.kind == "message":
            return costs.hop(self.stage, self.source, self.destination)
        return costs.comm if self.kind == "shards" else 0


class NodeInput(NamedTuple):
    """An input of an operation: the `op` result of `stage` for the same microbatch, and its link."""

    op: str
    stage: int
    link: EdgeKind


class OrderGraph:
    """The nodes of a schedule, rank after rank, and the inputs of each.

    * `steps[n]`: what node `n` runs. `first[rank]`: the first node of a rank; `first[-1]` ends the last rank. Barriers
      come after all ranks: their steps are actions of the operation that every shard must have finished.
    * `inputs[n]`: pairs of a node, or `MISSING`, and the number of a link in `links`.
    """

    def __init__(self, schedule: Schedule) -> None:
        require_schedule(schedule)
        require_steps(schedule)
        self.schedule, orders = schedule, schedule.orders
        self.lowered = schedule.is_lowered
        self.first = [0]
        for order in orders:
            self.first.append(self.first[-1] + len(order))
        self.steps: list[Step] = [step for order in orders for step in order]
        self.links: list[EdgeKind] = []
        self.inputs: list[tuple[tuple[int, int], ...]] = []
        self._link_numbers: dict[EdgeKind, int] = {}
        self._nodes: dict[tuple[str, int], list[int]] = {}  # by operation and stage, then by microbatch
        try:
            self._number_nodes()
            self._connect(orders)
        except (KeyError, IndexError, TypeError, ValueError):
            what = "an order has a step that its rank cannot run; `check` says which and why"
            raise ScheduleError(f"{self.schedule.name}: {what}") from None

    def rank(self, node: int) -> int:
        """Returns the rank of a node; that of a barrier is -1."""
        if node >= self.first[-1]:
            return -1
        return bisect_right(self.first, node) - 1

    def node(self, op: str, stage: int, microbatch: int) -> int:
        """Returns the node of an action, B for BW; `MISSING` if there is none."""
        return self._nodes[op, stage][microbatch]

    def nodes(self, rank: int) -> range:
        """Returns the nodes of a rank in its order."""
        return range(self.first[rank], self.first[rank + 1])

    def delays(self, costs: Costs) -> list[float]:
        """Returns the delay of every link."""
        return [link.delay(costs) for link in self.links]

    def times(self, costs: Costs) -> list[float]:
        """Returns the time of every node."""
        known = {(op, stage): time for op in COMPUTE for stage, time in enumerate(costs.times(op))}
        pairs: dict[tuple[int, int, str, str], float] = {}
        times: list[float] = []
        for step in self.steps:
            if step.__class__ is Pair:
                (op, stage, _), (other_op, other, _) = step
                key = (stage, other, other_op, op)
                if key not in pairs:
                    pairs[key] = costs.pair_time(*key)
                times.append(pairs[key])
            else:
                times.append(known.get((step[0], step[1]), 0))  # type: ignore[arg-type]
        times[self.first[-1] :] = [0] * (len(times) - self.first[-1])
        return times

    def _number_nodes(self) -> None:
        count = self.schedule.microbatches
        nodes = self._nodes
        for n, step in enumerate(self.steps):
            for op, stage, microbatch in step if step.__class__ is Pair else (step,):  # type: ignore[misc]
                event = _EVENT.get(op, op)
                if (event, stage) not in nodes:
                    nodes[event, stage] = [MISSING] * count
                if microbatch < 0:
                    raise IndexError
                nodes[event, stage][microbatch] = n

    def _connect(self, orders: Sequence[Sequence[Step]]) -> None:
        none = self._none = [MISSING] * self.schedule.microbatches
        barriers = self._add_barriers()
        for rank, order in enumerate(orders):
            rules: dict[tuple[str, int], list[tuple[list[int], int]]] = {}
            for n, step in enumerate(order, self.first[rank]):
                found: list[tuple[int, int]] = []
                for op, stage, microbatch in step if step.__class__ is Pair else (step,):  # type: ignore[misc]
                    rule = rules.get((op, stage))
                    if rule is None:
                        needed = self._needs(rank, op, stage)
                        rule = [(self._nodes.get((o, s), none), self._number(link)) for o, s, link in needed]
                        if (op, stage) in self._awaits:
                            rule.append((barriers[self._awaits[op, stage]], self._number(EdgeKind("shards"))))
                        rules[op, stage] = rule
                    for table, link in rule:
                        made = table[microbatch]
                        if made != n or op != W:  # a W may run beside its own B
                            found.append((made, link))
                self.inputs.append(tuple(found))
        local = self._number(EdgeKind("local"))
        for step in self.steps[self.first[-1] :]:
            assert isinstance(step, Action)
            tables = [self._nodes.get((step.op, shard), none) for shard in self.schedule.shards]
            self.inputs.append(tuple((table[step.microbatch], local) for table in tables))

    def _add_barriers(self) -> dict[str, list[int]]:
        """Appends one node per microbatch for each operation of which something awaits every shard."""
        schedule = self.schedule
        self._awaits = awaited(schedule, self.lowered) if schedule.shards else {}
        barriers: dict[str, list[int]] = {}
        for op in dict.fromkeys(self._awaits.values()):
            barriers[op] = [*range(len(self.steps), len(self.steps) + schedule.microbatches)]
            self.steps += [Action(op, schedule.shards[0], m) for m in range(schedule.microbatches)]
        return barriers

    def _number(self, link: EdgeKind) -> int:
        if link not in self._link_numbers:
            self._link_numbers[link] = len(self.links)
            self.links.append(link)
        return self._link_numbers[link]

    def needed_by(self, node: int) -> Iterator[tuple[Action, int]]:
        """Yields the actions that a node of a rank waits for, each with its node; of a barrier those of every shard."""
        step, rank = self.steps[node], self.rank(node)
        for op, stage, microbatch in step if isinstance(step, Pair) else (step,):
            found = [need[:2] for need in self._needs(rank, op, stage)]
            if (op, stage) in self._awaits:
                found += [(self._awaits[op, stage], shard) for shard in self.schedule.shards]
            for other, at in found:
                made = self._nodes.get((other, at), self._none)[microbatch]
                if made != node or op != W:
                    yield self._as_run(Action(other, at, microbatch), made), made

    def _as_run(self, action: Action, node: int) -> Action:
        """Returns B or BW, whichever the node runs."""
        step = self.steps[node] if node != MISSING else action
        actions = step if isinstance(step, Pair) else (step,)
        return next((each for each in actions if (_EVENT.get(each.op, each.op), *each[1:]) == action), action)

    def _needs(self, rank: int, op: str, stage: int) -> Iterator[NodeInput]:
        """Yields what `op` on `stage` of `rank` waits for, without the barriers over the vocabulary shards."""
        if op not in EXCHANGES and stage not in self.schedule.placement.stages_of(rank):
            raise KeyError
        schedule, local = self.schedule, EdgeKind("local")
        stages, beside = schedule.stages, schedule.placement.rank_beside
        if op in SENDS:
            yield NodeInput(MESSAGE_OPS[op].payload, stage, local)
            if (there := target(op, stage, stages)) is not None:
                yield NodeInput(other_end(op), there, EdgeKind("rendezvous"))
        elif op in COLLECTIVES:
            made = needs(op, stage, stages)
            yield from (NodeInput(other, at, local) for other, at in made if schedule.rank_of(at, 0) == rank)
        elif op == S:
            made = () if self.lowered else needs(op, stage, stages)
            yield from (NodeInput(other, at, EdgeKind("shards")) for other, at in made)
        elif op in COMPUTE_OPS:  # `check` proves the place of all others in the order of their rank
            for other, origin in needs(op, stage, stages):
                source_rank = beside(rank, stage, origin)
                if source_rank == rank:
                    yield NodeInput(other, origin, local)
                else:
                    link = EdgeKind("message", min(stage, origin), source_rank, rank)
                    yield NodeInput(SEND_OF[other] if self.lowered else other, origin, link)
        elif op not in OPS:
            raise KeyError(op)


_EVENT = {BW: B}


class NodeTimes(NamedTuple):
    """When every node starts and ends; None for those that never run. `stuck[rank]`: the node at which a rank stops."""

    start: list[float]
    end: list[float]
    stuck: dict[int, int]


def run(graph: OrderGraph, times: Sequence[float], delays: Sequence[float]) -> NodeTimes:
    """Runs every rank until it is done or waits for something that never happens: the longest path to every node.

    In a schedule messages are buffered without limit; in a lowered one a SEND waits for its receive.
    """
    inputs, ranks, last = graph.inputs, graph.schedule.ranks, len(graph.steps)
    start: list[float] = [None] * last  # type: ignore[list-item]
    end: list[float] = [None] * (last + 1)  # type: ignore[list-item]  # the last one stands for `MISSING`
    position = [*graph.first[:-1], *range(graph.first[-1], last)]  # barriers are ranks of one node
    stop = [*graph.first[1:], *range(graph.first[-1] + 1, last + 1)]
    waiting: dict[int, list[int]] = {}
    ready = deque(range(len(position)))
    while ready:
        rank = ready.popleft()
        n = position[rank]
        now: float = 0 if rank >= ranks or n == graph.first[rank] else end[n - 1]
        while n < stop[rank]:
            for made, link in inputs[n]:
                arrival = end[made]
                if arrival is None:
                    waiting.setdefault(made, []).append(rank)
                    break
                arrival += delays[link]
                if arrival > now:
                    now = arrival
            else:
                start[n] = now
                end[n] = now = now + times[n]
                if n in waiting:
                    ready.extend(waiting.pop(n))
                n += 1
                continue
            break
        position[rank] = n
    end.pop()
    return NodeTimes(start, end, {rank: n for rank, n in enumerate(position[:ranks]) if n < stop[rank]})


def blocking(graph: OrderGraph, node: int, end: Sequence[float], delays: Sequence[float]) -> int | None:
    """Returns the input that arrived after the rank was free and delayed a node; None if there is none.

    For a barrier it is the shard that came last.
    """
    last, arrived = MISSING, 0.0
    for made, link in graph.inputs[node]:
        if last == MISSING or end[made] + delays[link] > arrived:
            last, arrived = made, end[made] + delays[link]
    free = end[node - 1] if node != graph.first[graph.rank(node)] else 0
    if last == MISSING or arrived <= free:
        return None
    while last >= graph.first[-1]:
        last = max((made for made, _ in graph.inputs[last]), key=end.__getitem__)
    return last


def require_steps(schedule: Schedule) -> None:
    """Raises `ScheduleError` unless there is one order of known actions and pairs per rank."""
    if len(schedule.orders) != schedule.ranks:
        counts = f"{len(schedule.orders)} orders for {schedule.ranks} ranks"
        raise ScheduleError(f"{schedule.name}: {counts}; expected one per rank")
    for rank, order in enumerate(schedule.orders):
        if not set(map(type, order)) <= {Action, Pair}:
            index, step = next((i, step) for i, step in enumerate(order) if type(step) not in (Action, Pair))
            what = f"{step!r} is not a step; expected Action(op, stage, microbatch) or a Pair"
            raise ScheduleError(f"{schedule.name}: rank {rank}, step {index}: {what}")


def require_stages(schedule: Schedule, costs: Costs) -> None:
    """Raises `ScheduleError` unless there is one cost per stage."""
    if costs.stages != schedule.stages:
        hint = f"see costs.resized({schedule.stages})"
        raise ScheduleError(f"costs of {costs.stages} stages for {schedule.stages} stages of {schedule.name}; {hint}")


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Pauses the garbage collector, also as a decorator: for functions that make no reference cycles.

    Halves the time of `lower` on 200,000 actions; the collector is left as it was found.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
