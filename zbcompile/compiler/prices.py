"""The price of a stage, wherever a captured step is cut: from the graphs of its distinct blocks, before any stage is
compiled."""

import copy
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from torch.fx import Node

from zbcompile.compiler.block_prices import Made, price_line
from zbcompile.compiler.stage_price import StagePrice, costs_of, running_of
from zbcompile.compiler.stage_span import PolicyPrices, StageSpan, StageStart
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.compile_options import Choices, Policy, Recompute, price_of_policy
from zbcompile.passes.graph.storage import bytes_behind
from zbcompile.passes.machine.hardware import Connection, Hardware, hardware_for
from zbcompile.passes.partition.liveness import Line
from zbcompile.passes.partition.memory_estimate import (
    ALONE,
    Footprint,
    ReplicaSharding,
)
from zbcompile.passes.partition.node_costs import device_of
from zbcompile.passes.partition.stage_graphs import legs_of
from zbcompile.passes.stage.deduplicate import Tangents
from zbcompile.schedules import Costs, Placement, Schedule, peak_memory
from zbcompile.schedules.execution.memory import most_beside, with_messages
from zbcompile.schedules.ir.actions import B, F

PRICES = (1, 2, 4, 6, 8, 12, 16)  # of a byte, in the time to move it; above, stages remake what their blocks receive

LEVELS = 20  # steps of what a stage may keep: finer ones gain little, and equal stages with equal steps compile once


class ShardPrice(NamedTuple):
    """The price of one rank's shard of an output layer, for one microbatch: seconds of the vocabulary passes S and T
    (`scan`, `update`); bytes that wait from S to T (`state`), of its parameters, and of the last stage's output, which
    all ranks get and whose gradient they sum."""

    scan: float = 0.0
    update: float = 0.0
    state: float = 0.0
    parameters: float = 0.0
    output: float = 0.0


WHOLE = ShardPrice()  # of an output layer that is not sharded


@dataclass(frozen=True, eq=False)
class LinePrices:
    """The prices of a line of operations, cut anywhere; `edges` are the inner cuts, as numbers of nodes before each.

    `behind` are the gradients that arrive at the end of the line, None if it makes the loss; `made` remembers what was
    compiled. `shard` is what each rank has of a sharded output layer, `link` what connects two ranks (None: messages
    are free); `fused`: see `seconds_of`; `sharding` is what replicas divide.
    """

    canonical: Canonical
    line: Line
    choices: Choices
    behind: Tangents | None = None
    made: Made = field(default_factory=dict)
    shard: ShardPrice = WHOLE
    link: Connection | None = None
    fused: bool = False
    sharding: ReplicaSharding = ALONE

    _stages: dict[tuple[int, int, Policy], StagePrice] = field(init=False, default_factory=dict)
    _corners: dict[Policy, tuple[Policy, ...]] = field(init=False, default_factory=dict)
    _by_policy: dict[Policy, PolicyPrices] = field(init=False, default_factory=dict)
    _starts: dict[tuple[Any, ...], StageStart] = field(init=False, default_factory=dict)
    _sent: dict[tuple[tuple[int, ...], str], dict[tuple[int, int], int]] = field(init=False, default_factory=dict)

    def with_shard(self, shard: ShardPrice) -> "LinePrices":
        """The same line with another shard of the output layer. The prices of its stages do not depend on the shard:
        both share what either has computed of them."""
        found = copy.copy(self)  # unlike `replace` with these dicts, and with the cached properties
        object.__setattr__(found, "shard", shard)
        return found

    def for_replicas(self, sharding: ReplicaSharding) -> "LinePrices":
        """The same line for one of the replicas that divide what `sharding` says: it changes what stages hold."""
        found = copy.copy(self)
        found.__dict__.update(sharding=sharding, _stages={})
        found.__dict__.pop("footprint", None)
        return found

    @cached_property
    def loads(self) -> list[float]:
        """Seconds of all passes of each operation."""
        found = self._known("off").prices.seconds
        return [sum(each) for each in zip(*found, strict=True)]

    def costs(
        self,
        edges: Sequence[int],
        rows: float = 1,
        recompute: Recompute | None = None,
        placement: Placement | None = None,
    ) -> Costs:
        """The costs of the stages between `edges`, of microbatches with `rows` times as many rows. `recompute`
        replaces that of the choices. Without a `placement` every stage has a rank of its own."""
        stages = len(edges) + 1
        largest = [0] * stages
        for (source, _), size in self._messages(edges, placement or Placement("linear", stages, 1)).items():
            largest[source] = max(largest[source], size)
        prices = zip(self.stages(edges, recompute, rows), largest, strict=True)
        return costs_of(
            [price._replace(message=rows * size) for price, size in prices],
            vocab_s=(rows * self.shard.scan,) * stages,
            vocab_t=(rows * self.shard.update,) * stages,
            vocab_state=(rows * self.shard.state,) * stages,
            comm=self.link.latency if self.link else 0,
            bandwidth=self.link.bandwidth if self.link else None,
            time_unit="s",
            memory_unit="bytes",
        )

    def stages(self, edges: Sequence[int], recompute: Recompute | None = None, rows: float = 1) -> list[StagePrice]:
        """The price of each stage between `edges`."""
        choices = self.choices if recompute is None else replace(self.choices, recompute=recompute)
        spans = enumerate(pairwise([0, *edges, len(self.line.nodes)]))
        return [self.stage(a, b, choices.recompute_of(number)).of_rows(rows, b - a) for number, (a, b) in spans]

    def stage(self, begin: int, end: int, policy: Policy) -> StagePrice:
        """The price of the operations from `begin` to `end`; it is remembered, as many layouts have the same stage."""
        key = begin, end, policy
        if isinstance(policy, float):
            return self._with_share(begin, end, policy)
        if key not in self._stages:
            known, span = self._known(policy), self._span(begin, end, policy)
            waits = known.kept.within(begin, end) + sum(span.start.kept.values())
            exchange = (self._sum(each, begin, end) for each in known.prices.exchange)
            seconds, again = self._seconds(span, known)
            self._stages[key] = StagePrice(
                seconds,
                again,
                tuple(exchange),  # type: ignore[arg-type]
                min(waits, policy) if isinstance(policy, int) else waits,
                known.residue.within(begin, end),
                dict(zip((F, B), span.running(), strict=True)),
                self.line.boundary_bytes(end - 1) if end < len(self.line.nodes) else 0,
                self._saved(begin, end, policy, sum(each > 0 for each in seconds[1:])),
                parameters=self.footprint.resident(begin, end),
                gradients=self.footprint.gradients(begin, end),
            )
        return self._stages[key]

    def kept(self, begin: int, end: int) -> int:
        """What waits for the B of a stage that recomputes nothing."""
        return self._known("off").kept.within(begin, end)

    def _with_share(self, begin: int, end: int, share: float) -> StagePrice:
        """Between the corners around a share of what waits for B otherwise."""
        prices = [self.stage(begin, end, policy) for policy in self._corners_from("off")]
        aim = share * prices[0].kept
        for over, under in pairwise(prices):
            if under.kept <= aim < over.kept:
                return over.mixed(under, (over.kept - aim) / (over.kept - under.kept))
        return prices[0] if aim >= prices[0].kept else prices[-1]

    @property
    def blocks(self) -> list[int]:
        """Where blocks begin, as numbers of nodes before."""
        return sorted(self._known("off").prices.blocks)

    @cached_property
    def corners(self) -> tuple[Policy, ...]:
        """The policies of recomputing among which stages choose, from nothing but what was hinted at to everything."""
        return self._corners_from("hints")

    @cached_property
    def levels(self) -> tuple[Policy, ...]:
        """The same in even steps of what waits otherwise, from everything to nothing but what was hinted at."""
        full, hints, whole = (self.stage(0, len(self.line.nodes), each).kept for each in ("full", "hints", "off"))
        shares = (number / LEVELS for number in range(1, LEVELS))
        return "full", *(share for share in shares if full < share * whole < hints), "hints"

    def _corners_from(self, first: Policy) -> tuple[Policy, ...]:
        """Prices of a byte between `first` and everything: those on the convex hull of what waits for B and of what B
        takes."""
        if first in self._corners:
            return self._corners[first]
        hardware = self._hardware
        unit = 1e3 * 2**30 / (hardware.bandwidth * hardware.bandwidth_efficiency)  # milliseconds to move a GiB
        prices = dict.fromkeys(f"{times * unit:.2g}ms/GiB" for times in PRICES)
        ends: list[Policy] = [first, *(name for name in prices if price_of_policy(name)), "full"]
        hull: list[tuple[float, float, Policy]] = []
        for policy in ends:
            found = [self.stage(*span, policy) for span in pairwise([*self.blocks, len(self.line.nodes)])]
            point = sum(each.kept for each in found), sum(sum(each.seconds) for each in found), policy
            while len(hull) > 1 and _is_above(hull[-1], hull[-2], point):
                hull.pop()
            if not hull or point[0] < hull[-1][0]:
                hull.append(point)
        self._corners[first] = tuple(policy for *_, policy in hull)
        return self._corners[first]

    def _messages(self, edges: Sequence[int], placement: Placement) -> dict[tuple[int, int], int]:
        """Bytes by the stages that a message goes from and to: to the next, or straight to the one that reads it."""
        key = tuple(edges), str(placement)
        if key not in self._sent:
            crossing = dict.fromkeys(value for edge in edges for value in self.line.live[edge - 1])
            values: dict[tuple[int, int], list[Node]] = {}
            places = self._places

            def stage_of(node: Node, default: int) -> int:
                return bisect_right(edges, places[node]) if node in places else default

            for leg in legs_of(self.canonical, crossing, stage_of, len(edges)):
                values.setdefault((leg.source, leg.target), []).append(leg.value)
            self._sent[key] = {ends: bytes_behind(each) for ends, each in values.items()}
        return self._sent[key]

    @cached_property
    def _places(self) -> dict[Node, int]:
        return {node: place for place, node in enumerate(self.line.nodes)}

    def _span(self, begin: int, end: int, policy: Policy) -> StageSpan:
        known, off = self._known(policy), self._known("off")
        as_priced: Policy = "off" if known is off else policy
        return StageSpan(self.line, self._places, begin, end, known, off, as_priced, self.choices, self._starts)

    def _seconds(self, span: StageSpan, known: PolicyPrices) -> tuple[tuple[float, float, float], float]:
        """Seconds of F, B and W, and of B's those in which it recomputes."""
        begin, end = span.begin, span.end
        again = sum(seconds for _, seconds in span.again())
        forward, backward, weight = (self._sum(each, begin, end) for each in known.prices.seconds)
        found = forward, backward + again, weight
        return tuple(each + self._hardware.start * (each > 0) for each in found), again  # type: ignore[return-value]

    def _saved(self, begin: int, end: int, policy: Policy, passes: int) -> float:
        """Seconds that BW takes less than B and W: it starts once, they `passes` times."""
        saved = self._sum(self._known(policy).prices.saved, begin, end) + self._hardware.start * max(0, passes - 1)
        return max(0.0, saved)

    def _sum(self, seconds: Sequence[float], begin: int, end: int) -> float:
        return sum(seconds[begin:end])

    @property
    def shard_bytes(self) -> float:
        """Bytes that a rank holds all the time of a sharded output layer."""
        return self.shard.parameters * (2 + self.choices.optimizer_state / self.sharding.state_parts)

    def resident(self, edges: Sequence[int], placement: Placement) -> tuple[float, ...]:
        """Bytes that each rank holds all the time: parameters, gradients, optimizer state and buffers."""
        held = [self.footprint.resident(*span) for span in pairwise([0, *edges, len(self.line.nodes)])]
        found = [self.shard_bytes] * placement.ranks
        for stage, size in enumerate(held):
            for rank in placement.ranks_of(stage):
                found[rank] += size
        for positions, size, gradient in self.footprint.shared:
            stages = {bisect_right(edges, at) for at in positions}
            owners = Counter(rank for stage in stages for rank in placement.ranks_of(stage) if len(stages) > 1)
            for rank, count in owners.items():  # held once, and a sum of gradients for each stage
                found[rank] += count * gradient - (count - 1) * size
        return tuple(found)

    def gradients(self, edges: Sequence[int], placement: Placement) -> tuple[float, ...]:
        """Bytes of the gradients that each rank sums over its replicas; of a sharded output layer those of its part."""
        found = [self.shard.parameters] * placement.ranks
        for stage, span in enumerate(pairwise([0, *edges, len(self.line.nodes)])):
            found[placement.rank(stage)] += self.footprint.gradients(*span)
        return tuple(found)

    def always_held(self, placement: Placement, edges: Sequence[int], rows: float = 1) -> tuple[float, ...]:
        """`resident`, and buffers for one message on each way between two ranks."""
        found = list(self.resident(edges, placement))
        for (source, target), size in self._messages(edges, placement).items():
            for ends in zip(placement.ranks_of(source), placement.ranks_of(target), strict=True):
                for rank in ends if ends[0] != ends[1] else ():
                    found[rank] += rows * size
        return tuple(found)

    def held_by_any_order(
        self, placement: Placement, edges: Sequence[int], rows: float = 1, recompute: Recompute | None = None
    ) -> tuple[float, ...]:
        """`always_held` with the bytes of the running pass, taken as those of the pass that needs most."""
        costs = with_messages(self.costs(edges, rows, recompute, placement), placement)
        passes = most_beside(placement, costs, running_of(self.stages(edges, recompute, rows)))
        return tuple(map(sum, zip(self.always_held(placement, edges, rows), passes, strict=True)))

    def most_held(
        self, schedule: Schedule, edges: Sequence[int], rows: float = 1, recompute: Recompute | None = None
    ) -> tuple[float, ...]:
        """The most bytes that each rank holds at any moment of a step."""
        placement, sharding = schedule.placement, self.sharding
        costs = with_messages(self.costs(edges, rows, recompute, placement), placement)
        running = running_of(self.stages(edges, recompute, rows))
        waiting = peak_memory(schedule, costs, running)
        if sharding.zero == 1 and sharding.replicas > 1:  # a part of the sums over replicas beside all gradients
            parts = (each / sharding.replicas for each in self.gradients(edges, placement))
            waiting = tuple(map(max, waiting, parts))
        return tuple(map(sum, zip(waiting, self.always_held(placement, edges, rows), strict=True)))

    def held_before(self, recompute: bool) -> list[float]:
        """Bytes that a rank with the first k nodes holds with one microbatch, by k; recomputed values not counted."""
        ends = range(len(self.line.nodes) + 1)
        kept = [0, *self._known("off").kept.growing(0, len(self.line.nodes))]
        return [self.footprint.resident(0, end) + (0 if recompute else kept[end]) for end in ends]

    @cached_property
    def footprint(self) -> Footprint:
        """What spans of the line hold all the time."""
        return Footprint(self.canonical, self.line, self.choices.optimizer_state, self.sharding)

    def _known(self, policy: Policy) -> PolicyPrices:
        if isinstance(policy, int) or (policy == "hints" and not self._has_hints):  # bytes decide about whole stages
            policy = "off"
        if policy not in self._by_policy:
            base = self._known("off").prices if policy == "full" else None
            choices = replace(self.choices, recompute=policy)
            prices = price_line(self.canonical, self.line, choices, self.behind, self.made, base, self.fused)
            self._by_policy[policy] = PolicyPrices.of(prices, len(self.line.nodes))
        return self._by_policy[policy]

    @cached_property
    def _has_hints(self) -> bool:
        return any(node.meta.get("recompute") is not None for node in self.line.nodes)

    @cached_property
    def _hardware(self) -> Hardware:
        return self.choices.hardware or hardware_for(device_of(self.line))


def _is_above(
    point: tuple[float, float, Policy], left: tuple[float, float, Policy], right: tuple[float, float, Policy]
) -> bool:
    """Whether a corner takes no less than the line between its neighbours, of which the left one keeps more bytes."""
    return (point[1] - left[1]) * (left[0] - right[0]) >= (right[1] - left[1]) * (left[0] - point[0])
