"""What a captured step costs, however it is cut: estimated from its operations, before anything is compiled."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch.fx import Node

from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.graph.storage import storage_bytes, tensors_of
from zbcompile.passes.hardware.hardware import Connection, Hardware, hardware_for
from zbcompile.passes.partition.inside_calls import Inside
from zbcompile.passes.partition.liveness import Line, held_behind
from zbcompile.passes.partition.memory_estimate import Footprint
from zbcompile.passes.partition.node_costs import call_seconds, device_of, unrepeated_seconds
from zbcompile.passes.partition.running_bytes import Running, RunningBytes
from zbcompile.schedules import Costs, Placement, Schedule, peak_memory
from zbcompile.schedules.execution.memory import most_beside, with_messages
from zbcompile.schedules.ir.actions import B, F


class Shares(NamedTuple):
    """How the load of an operation, its forward and its whole backward, divides among the passes."""

    forward: float
    backward: float
    weight: float


class Shard(NamedTuple):
    """Seconds of the vocabulary passes S and T of one microbatch, bytes that it leaves from S to T, bytes of the
    parameters, and those of the last stage's output, which all ranks get, and of its gradient, which they sum."""

    scan: float = 0.0
    update: float = 0.0
    state: float = 0.0
    parameters: float = 0.0
    output: float = 0.0


WHOLE = Shard()  # of an output layer that is not sharded


class Span(NamedTuple):
    """A stage: seconds of its three passes, bytes of a microbatch without recomputation and with, bytes held all the
    time."""

    seconds: tuple[float, ...]
    running: tuple[Running, Running]
    resident: float


FORWARD_ONLY, NO_WEIGHT, NO_INPUT = Shares(1, 0, 0), Shares(1 / 3, 2 / 3, 0), Shares(1 / 3, 0, 2 / 3)
START = 5e-6  # seconds to start one operation, on CPU and GPU alike
BOTH = Shares(1 / 3, 1 / 3, 1 / 3)


@dataclass(frozen=True)
class LineCosts:
    """The costs of a line of operations, cut anywhere: seconds from the `loads` of its nodes (forward and backward),
    bytes from what autograd keeps. `edges` are the inner cuts, as numbers of nodes before each.

    `shard` is what each rank has of a sharded output layer, `link` what connects two ranks (None: messages are free),
    `hardware` what computes (None: the device at nominal speeds).
    """

    canonical: Canonical
    line: Line
    loads: Sequence[float]
    optimizer_state: float = 2.0
    shard: Shard = WHOLE
    link: Connection | None = None
    hardware: Hardware | None = None

    def with_shard(self, shard: Shard) -> "LineCosts":
        """The same stages, whose costs are known already, beside another shard of the output layer."""
        found = replace(self, shard=shard)
        found.__dict__.update({name: getattr(self, name) for name in ("_spans", "_widths", "footprint", "_running")})
        return found

    def costs(self, edges: Sequence[int], rows: float = 1, recompute: bool = False) -> Costs:
        """The costs of the stages between `edges`, of microbatches with `rows` times as many rows; with `recompute` a
        stage keeps its inputs alone, and its backward runs the forward again."""
        spans = list(pairwise([0, *edges, len(self.line.nodes)]))
        found = [self._span(span) for span in spans]
        pairs = list(zip(found, spans, strict=True))
        forward, backward, weight = (
            tuple(_scaled(each.seconds[op], rows, self._started[b] - self._started[a]) for each, (a, b) in pairs)
            for op in range(3)
        )
        crossing = [self._crossing(edge) for edge in edges]
        running = [each.running[recompute] for each in found]
        if recompute:
            kept = (rows * (self._unrepeated[b] - self._unrepeated[a]) for a, b in spans)
            again = (max(0.0, one - other) for one, other in zip(forward, kept, strict=True))
            backward = tuple(map(sum, zip(again, backward, strict=True)))
        return Costs(
            forward,
            backward,
            weight,
            activation=tuple(rows * each.kept for each in running),
            residue=tuple(rows * each.residue for each in running),
            vocab_s=(rows * self.shard.scan,) * len(spans),
            vocab_t=(rows * self.shard.update,) * len(spans),
            vocab_state=(rows * self.shard.state,) * len(spans),
            message=tuple(rows * size for size in (*crossing, 0)),
            comm=self.link.latency if self.link else 0,
            bandwidth=self.link.bandwidth if self.link else None,
            **dict.fromkeys(("cast", "stats"), self._exchange(rows)),
            time_unit="s",
            memory_unit="bytes",
        )

    def _exchange(self, rows: float) -> float | None:
        """Until every rank has the last stage's output, or the sum of all parts of its gradient."""
        if self.link is None or not self.shard.output:
            return None
        return self.link.latency + rows * self.shard.output / self.link.bandwidth

    @property
    def shard_bytes(self) -> float:
        """What a rank holds all the time of a sharded output layer."""
        return self.shard.parameters * (2 + self.optimizer_state)

    def resident(self, edges: Sequence[int], placement: Placement) -> tuple[float, ...]:
        """Bytes that each rank holds all the time: parameters, gradients, optimizer state and buffers."""
        held = [self._span(span).resident for span in pairwise([0, *edges, len(self.line.nodes)])]
        copies = (0, 1) if placement.kind == "dual" else (0,)
        found = [self.shard_bytes] * placement.ranks
        for stage, size in enumerate(held):
            for copy in copies:
                found[placement.rank(stage, copy)] += size
        for positions, size, gradient in self.footprint.shared:
            stages = {bisect_right(edges, at) for at in positions}
            owners = Counter(placement.rank(stage, copy) for stage in stages for copy in copies if len(stages) > 1)
            for rank, count in owners.items():  # held once, and a sum of gradients for each stage
                found[rank] += count * gradient - (count - 1) * size
        return tuple(found)

    def gradients(self, edges: Sequence[int], placement: Placement) -> tuple[float, ...]:
        """Bytes of the gradients that each rank sums over its replicas; of a sharded output layer those of its part."""
        found = [self.shard.parameters] * placement.ranks
        for stage, span in enumerate(pairwise([0, *edges, len(self.line.nodes)])):
            found[placement.rank(stage)] += self.footprint.gradients(*span)
        return tuple(found)

    def running(self, edges: Sequence[int], rows: float = 1, recompute: bool = False) -> dict[str, tuple[float, ...]]:
        """The most bytes of a microbatch that are alive while F and B of each stage run."""
        found = [self._span(span).running[recompute] for span in pairwise([0, *edges, len(self.line.nodes)])]
        return {F: tuple(rows * each.forward for each in found), B: tuple(rows * each.backward for each in found)}

    def always_held(self, placement: Placement, edges: Sequence[int], rows: float = 1) -> tuple[float, ...]:
        """`resident`, and buffers for one message over each cut between two ranks."""
        found = list(self.resident(edges, placement))
        for stage, edge in enumerate(edges):
            for copy in (0, 1) if placement.kind == "dual" else (0,):
                ranks = {placement.rank(stage, copy), placement.rank(stage + 1, copy)}
                for rank in ranks if len(ranks) > 1 else ():
                    found[rank] += rows * self._crossing(edge)
        return tuple(found)

    def held_by_any_order(
        self, placement: Placement, edges: Sequence[int], rows: float = 1, recompute: bool = False
    ) -> tuple[float, ...]:
        """The same with the pass that runs, as if it always were the one that needs most."""
        costs = with_messages(self.costs(edges, rows, recompute), placement)
        beside = most_beside(placement, costs, self.running(edges, rows, recompute))
        return tuple(map(sum, zip(self.always_held(placement, edges, rows), beside, strict=True)))

    def most_held(
        self, schedule: Schedule, edges: Sequence[int], rows: float = 1, recompute: bool = False
    ) -> tuple[float, ...]:
        """The most bytes that each rank holds at any moment of a step."""
        costs, placement = self.costs(edges, rows, recompute), schedule.placement
        waiting = peak_memory(schedule, with_messages(costs, placement), self.running(edges, rows, recompute))
        return tuple(map(sum, zip(waiting, self.always_held(placement, edges, rows), strict=True)))

    def held_before(self, recompute: bool) -> list[float]:
        """Bytes that a rank with the first k nodes holds with one microbatch, by k; recomputed values not counted."""
        footprint, ends = self.footprint, range(len(self.line.nodes) + 1)
        return [footprint.resident(0, end) + (0 if recompute else footprint.kept(0, end)) for end in ends]

    def _span(self, span: tuple[int, int]) -> "Span":
        """Remembered: a search looks at the same stage in many layouts."""
        if span not in self._spans:
            begin, end = span
            seconds = tuple(max(0.0, totals[end] - totals[begin]) for totals in self._totals)
            kept, crossing = self.footprint.kept(begin, end), (self._crossing(begin), self._crossing(end))
            running = self._running.of(*span, kept, crossing), self._running.of(*span, kept, crossing, recompute=True)
            self._spans[span] = Span(seconds, running, self.footprint.resident(begin, end))
        return self._spans[span]

    def _crossing(self, edge: int) -> int:
        if edge not in self._widths:
            holders = self.canonical.graph.find_nodes(op="placeholder") if edge == 0 else []
            arriving = [node.meta["val"] for node in holders if node.meta["slot"].kind == "activation"]
            inner = 0 < edge < len(self.line.nodes)
            self._widths[edge] = self.line.boundary_bytes(edge - 1) if inner else storage_bytes(arriving)
        return self._widths[edge]

    @cached_property
    def _spans(self) -> dict[tuple[int, int], "Span"]:
        return {}

    @cached_property
    def _widths(self) -> dict[int, int]:
        return {}

    @cached_property
    def footprint(self) -> Footprint:
        """What spans of the line hold."""
        return Footprint(self.canonical, self.line, self.optimizer_state)

    @cached_property
    def _totals(self) -> tuple[list[float], ...]:
        """For each pass, what the first k nodes take."""
        parts = [[load * part for part in shares] for load, shares in zip(self.loads, self._shares, strict=True)]
        return tuple([0.0, *accumulate(column)] for column in zip(*parts, strict=True))

    @cached_property
    def _unrepeated(self) -> list[float]:
        """Seconds of the forward of the first k nodes that full recomputation leaves out."""
        hardware = self.hardware or hardware_for(device_of(self.line))
        return [0.0, *accumulate(unrepeated_seconds(node, self.line, hardware) for node in self.line.nodes)]

    @cached_property
    def _started(self) -> list[float]:
        """How many operations a pass of the first k nodes starts, a third of what F, B and W of a call do."""
        inside = self.line.inside
        counts = (sum(map(len, inside[n].passes)) / 3 if n in inside else 1 for n in self.line.nodes)
        return [0.0, *accumulate(counts)]

    @cached_property
    def _shares(self) -> list[Shares]:
        on_line = frozenset(self.line.nodes)
        hardware, inside = self.hardware or hardware_for(device_of(self.line)), self.line.inside
        return [
            shares_inside(inside[node], hardware)
            if node in inside
            else shares_of(node, on_line, bool(self.line.flops.get(node)))
            for node in self.line.nodes
        ]

    @cached_property
    def _running(self) -> RunningBytes:
        return RunningBytes(
            self.line, self.footprint.stored, list(map(self._for_weight, self.line.nodes, self._shares))
        )

    def _for_weight(self, node: Node, shares: Shares) -> tuple[frozenset[int], int]:
        """What the weight gradients of an operation are made of: storages that it reads, and bytes of gradients."""
        if not shares.weight:
            return frozenset(), 0
        read, left = node.all_input_nodes, _bytes(node)
        if node in self.line.inside:
            parts = self.line.inside[node].left
            read, left = [read[at] for at, _ in parts if at is not None], sum(size for at, size in parts if at is None)
        return frozenset(key for each in read for key in self.footprint.stored.behind[each]), left


def shares_of(node: Node, on_line: frozenset[Node], contracts: bool) -> Shares:
    """A product with a trained parameter makes two gradients, a lookup in one that of the parameter alone; the backward
    of everything else is almost all for its inputs."""
    if not node.meta["differentiable"]:
        return FORWARD_ONLY
    trained = any(h.meta["slot"].kind == "parameter" and h.meta["differentiable"] for h in held_behind(node, on_line))
    flows = any(a in on_line and a.meta["differentiable"] for a in node.all_input_nodes)
    if trained and not flows:
        return NO_INPUT
    return BOTH if trained and contracts else NO_WEIGHT


def shares_inside(call: Inside, hardware: Hardware) -> Shares:
    """Of an operator that stands for a call, as its operations divide."""
    seconds = call_seconds(call, hardware)
    return Shares(*(each / sum(seconds) for each in seconds)) if sum(seconds) else FORWARD_ONLY


def _scaled(seconds: float, rows: float, operations: float) -> float:
    """The time of so many operations on `rows` times as many rows: what it takes to start them stays."""
    fixed = min(seconds, operations * START)
    return fixed + rows * (seconds - fixed)


def _bytes(node: Node) -> int:
    return storage_bytes(tensors_of(node.meta["val"]))
