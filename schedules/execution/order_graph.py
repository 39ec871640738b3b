"""The graph of an order: the inputs of every step, and the longest-path run that times it.

A node is a step of a rank: an action, or a pair of actions that run together. Its rank runs it
after the step before it. Further inputs are results of the same rank, messages of other ranks, and
barriers over the vocabulary shards, which are nodes without a rank. In a lowered schedule a SEND
also waits until its receive is posted, so a graph that runs to its end cannot deadlock, in whatever
order the ranks proceed.

The simulator, idle causes, critical path, deadlock text, `check` and `lower` read this graph.
"""

import gc
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from zbcompile.schedules.errors import ScheduleError
from zbcompile.schedules.ir.actions import (
    BW,
    COLLECTIVES,
    COMPUTE,
    SENDS,
    Action,
    B,
    Pair,
    S,
    Step,
    W,
)
from zbcompile.schedules.ir.costs import Costs
from zbcompile.schedules.ir.dependencies import needs, routes_of, shard_dependencies
from zbcompile.schedules.ir.kinds import COMPUTE_OPS, MESSAGE_OPS, OPS
from zbcompile.schedules.ir.schedule import Schedule, require_schedule

MISSING = -1  # the node of an action that no rank runs
Delayed = list[tuple[int, float]]  # nodes, each with the delay of its link


class EdgeKind(NamedTuple):
    """The kind of an input of a node, which decides how long the result is sent.

    `kind` is "local" (the same rank, no delay), "message" (across the boundary behind `stage`),
    "shards" (a collective of the vocabulary shards) or "rendezvous" (until a receive is posted; no
    delay).
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


LOCAL, SHARDS, RENDEZVOUS = EdgeKind("local"), EdgeKind("shards"), EdgeKind("rendezvous")


class OrderGraph:
    """The nodes of a schedule, rank after rank, and the inputs of each.

    * `steps[n]`: what node `n` runs. `first[rank]`: the first node of a rank; `first[-1]` ends the
      last rank. Barriers come after all ranks: their steps are actions of the operation that every
      shard must have finished.
    * `inputs[n]`: pairs of a node, or `MISSING`, and the number of a link in `links`.
    """

    def __init__(self, schedule: Schedule) -> None:
        require_schedule(schedule)
        require_steps(schedule)
        self.schedule = schedule
        self.first = [0]
        for order in schedule.orders:
            self.first.append(self.first[-1] + len(order))
        self.steps: list[Step] = [step for order in schedule.orders for step in order]
        self.inputs: list[tuple[tuple[int, int], ...]] = []
        self._link_numbers: dict[EdgeKind, int] = {}
        # by operation and stage, then by microbatch
        self._nodes: dict[tuple[str, int], list[int]] = {}
        self._none = [MISSING] * schedule.microbatches
        try:
            self._number_nodes()
            self._routes = [routes_of(schedule, rank) for rank in range(schedule.ranks)]
            self._shard_needs = shard_dependencies(schedule, schedule.is_lowered)
            self._connect()
        except (KeyError, IndexError, TypeError, ValueError):
            what = "an order has a step that its rank cannot run; `check` says which and why"
            raise ScheduleError(f"{schedule.name}: {what}") from None
        self.links = list(self._link_numbers)

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

    def inputs_and_users(self, costs: Costs) -> tuple[list[Delayed], list[Delayed]]:
        """Returns the inputs of every node, and the nodes that it is an input of, each with the
        delay of the link."""
        delays = self.delays(costs)
        inputs: list[Delayed] = [
            [(producer, delays[link]) for producer, link in links] for links in self.inputs
        ]
        users: list[Delayed] = [[] for _ in inputs]
        for user, delayed in enumerate(inputs):
            for producer, delay in delayed:
                users[producer].append((user, delay))
        return inputs, users

    def times(self, costs: Costs) -> list[float]:
        """Returns the time of every node."""
        times = {(op, stage): time for op in COMPUTE for stage, time in enumerate(costs.times(op))}
        pair_time, result = cache(costs.pair_time), list[float]()
        for step in self.steps[: self.first[-1]]:
            if step.__class__ is Pair:
                (op, stage, _), (partner_op, partner, _) = step
                result.append(pair_time(op, stage, partner_op, partner))
            else:
                result.append(times.get((step[0], step[1]), 0))  # type: ignore[arg-type]
        return result + [0] * (len(self.steps) - len(result))

    def _number_nodes(self) -> None:
        nodes = self._nodes
        for n, step in enumerate(self.steps):
            for op, stage, microbatch in step if step.__class__ is Pair else (step,):  # type: ignore[misc]
                result = B if op == BW else op
                if (result, stage) not in nodes:
                    nodes[result, stage] = self._none[:]
                if microbatch < 0:
                    raise IndexError
                nodes[result, stage][microbatch] = n

    def _connect(self) -> None:
        schedule, numbers = self.schedule, self._link_numbers
        # by operation that every shard must have run, the node of each microbatch
        barriers: dict[str, list[int]] = {}
        for op in dict.fromkeys(self._shard_needs.values()):
            barriers[op] = [*range(len(self.steps), len(self.steps) + schedule.microbatches)]
            self.steps += [Action(op, schedule.shards[0], m) for m in range(schedule.microbatches)]
        for rank, order in enumerate(schedule.orders):
            rules: dict[tuple[str, int], list[tuple[list[int], int]]] = {}
            for n, step in enumerate(order, self.first[rank]):
                inputs: list[tuple[int, int]] = []
                for op, stage, microbatch in step if step.__class__ is Pair else (step,):  # type: ignore[misc]
                    rule = rules.get((op, stage))
                    if rule is None:
                        rule = rules[op, stage] = [
                            (
                                self._nodes.get((o, s), self._none),
                                numbers.setdefault(link, len(numbers)),
                            )
                            for o, s, link in self._needs(rank, op, stage)
                        ]
                        if (op, stage) in self._shard_needs:
                            barrier = barriers[self._shard_needs[op, stage]]
                            rule.append((barrier, numbers.setdefault(SHARDS, len(numbers))))
                    for table, link in rule:
                        producer = table[microbatch]
                        if producer != n or op != W:  # a W may run beside its own B
                            inputs.append((producer, link))
                self.inputs.append(tuple(inputs))
        local = numbers.setdefault(LOCAL, len(numbers))
        for op, nodes in barriers.items():
            tables = [self._nodes.get((op, shard), self._none) for shard in schedule.shards]
            self.inputs += [tuple((table[m], local) for table in tables) for m in range(len(nodes))]

    def needed_by(self, node: int) -> Iterator[tuple[Action, int]]:
        """Yields the actions that a node of a rank needs, each with its node; of a barrier those of
        every shard."""
        step, rank = self.steps[node], self.rank(node)
        for op, stage, microbatch in step if isinstance(step, Pair) else (step,):
            needed = [(result, origin) for result, origin, _ in self._needs(rank, op, stage)]
            if (op, stage) in self._shard_needs:
                needed += [(self._shard_needs[op, stage], shard) for shard in self.schedule.shards]
            for result, origin in needed:
                producer = self._nodes.get((result, origin), self._none)[microbatch]
                if producer != node or op != W:
                    yield Action(result, origin, microbatch), producer

    def _needs(self, rank: int, op: str, stage: int) -> Iterator[tuple[str, int, EdgeKind]]:
        """Yields what `op` on `stage` of `rank` needs, without barriers: operation, stage
        and link."""
        schedule, routes = self.schedule, self._routes[rank]
        if stage not in schedule.placement.stages_of(rank):
            raise KeyError
        if op in SENDS:
            payload = MESSAGE_OPS[op]
            yield payload, stage, LOCAL
            yield f"RECV_{payload}", routes[op, stage].stage, RENDEZVOUS
        elif op in COLLECTIVES:
            for result, origin in needs(op, stage, schedule.stages):
                if schedule.rank_of(origin, 0) == rank:
                    yield result, origin, LOCAL
        elif op == S:
            if not schedule.is_lowered:
                yield from (
                    (result, origin, SHARDS) for result, origin in needs(op, stage, schedule.stages)
                )
        elif op in COMPUTE_OPS:  # `check` proves the place of all others in the order of their rank
            for result, origin in needs(op, stage, schedule.stages):
                source = rank if origin == stage else routes[f"RECV_{result}", stage].source
                if source == rank:
                    yield result, origin, LOCAL
                else:
                    sender = f"SEND_{result}" if schedule.is_lowered else result
                    yield sender, origin, EdgeKind("message", min(stage, origin), source, rank)
        elif op not in OPS:
            raise KeyError(op)


class NodeTimes(NamedTuple):
    """When every node starts and ends; None for those that never run. `stuck[rank]`: the node at
    which a rank stops."""

    start: list[float]
    end: list[float]
    stuck: dict[int, int]


def run(graph: OrderGraph, times: Sequence[float], delays: Sequence[float]) -> NodeTimes:
    """Runs every rank until it is done or blocked for good: the longest path to every node.

    In a schedule messages are buffered without limit; in a lowered one a SEND blocks until its
    receive is posted.
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
            for producer, link in inputs[n]:
                arrival = end[producer]
                if arrival is None:
                    waiting.setdefault(producer, []).append(rank)
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
    return NodeTimes(
        start, end, {rank: n for rank, n in enumerate(position[:ranks]) if n < stop[rank]}
    )


def blocking(
    graph: OrderGraph, node: int, end: Sequence[float], delays: Sequence[float]
) -> int | None:
    """Returns the input that arrived after the rank was free and delayed a node; None if there is
    none.

    For a barrier it is the shard that came last.
    """
    last, arrived = MISSING, 0.0
    for producer, link in graph.inputs[node]:
        if last == MISSING or end[producer] + delays[link] > arrived:
            last, arrived = producer, end[producer] + delays[link]
    free = end[node - 1] if node != graph.first[graph.rank(node)] else 0
    if last == MISSING or arrived <= free:
        return None
    while last >= graph.first[-1]:
        last = max((producer for producer, _ in graph.inputs[last]), key=end.__getitem__)
    return last


def require_steps(schedule: Schedule) -> None:
    """Raises `ScheduleError` unless there is one order of known actions and pairs per rank."""
    if len(schedule.orders) != schedule.ranks:
        counts = f"{len(schedule.orders)} orders for {schedule.ranks} ranks"
        raise ScheduleError(f"{schedule.name}: {counts}; expected one per rank")
    for rank, order in enumerate(schedule.orders):
        for step in order:
            if step.__class__ not in (Action, Pair):
                expected = "expected Action(op, stage, microbatch) or a Pair"
                raise ScheduleError(f"{schedule.name}: {step!r} on rank {rank}; {expected}")


def require_stages(schedule: Schedule, costs: Costs) -> None:
    """Raises `ScheduleError` unless there is one cost per stage."""
    if costs.stages != schedule.stages:
        counts = f"costs of {costs.stages} stages for {schedule.stages} stages of {schedule.name}"
        raise ScheduleError(f"{counts}; see costs.resized({schedule.stages})")


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Pauses the garbage collector, also as a decorator: for functions that make no reference
    cycles.

    Halves the time of `lower` on 200,000 actions; the collector is left as it was found.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
