"""Overweight: a stage (in a V, a rank) that no cuts make as light as the others, and remedies.

Its time is the step's time. The usual cause is the output layer of a large vocabulary, which no cut divides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.partition.balance import Row
from zbcompile.passes.partition.liveness import Line
from zbcompile.passes.partition.search import Limits, choose_edges

WORTH_SAYING = 1.2  # the heaviest over the mean
GAIN = 0.05  # a remedy must lower that ratio by at least this


@dataclass(frozen=True)
class Overweight:
    """`who` ("stage 3" or "rank 0") carries `ratio` times the mean load; `share` of that is the operation `operation`
    in `module`, the last product before the loss if `is_head`. `remedies` are other placements with the ratio that they
    would have."""

    who: str
    ratio: float
    operation: str
    module: str
    share: float
    is_head: bool
    remedies: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        place = f" in {self.module}" if self.module else ""
        cause = f"{self.operation}{place} alone is {self.share:.0%} of it"
        better = [f"{change} (then {ratio:.2f})" for change, ratio in self.remedies]
        shard = ["vocab=1, which shards an output layer over all ranks (docs/vocabulary.md)"] if self.is_head else []
        advice = "; ".join([*better, *shard]) or "fewer ranks or chunks, or a deeper model"
        return (
            f"{self.who} carries {self.ratio:.2f} times the mean load, and a step is as slow as its heaviest rank: "
            f"{cause}. To change that: {advice}."
        )


def find_overweight(
    line: Line,
    loads: Sequence[float],
    edges: Sequence[int],
    ranks_of: Sequence[int],
    others: Mapping[str, Sequence[int]],
) -> Overweight | None:
    """The cause if the cuts at `edges` are uneven, else None. `others` are placements that might be better (the rank of
    each stage), keyed by the change that gives them."""
    totals = [0.0, *accumulate(loads)]
    row = Row(totals, ranks_of)
    ratio, index = _ratio(row, edges)
    if ratio < WORTH_SAYING:
        return None
    spans = enumerate(zip([0, *edges], [*edges, len(loads)], strict=True))
    inside = [i for stage, (a, b) in spans if (ranks_of[stage] if row.folded else stage) == index for i in range(a, b)]
    heaviest = max(inside, key=loads.__getitem__)
    node = line.nodes[heaviest]
    origin = origin_of(node)
    share = loads[heaviest] / sum(loads[i] for i in inside)
    is_head = not any(line.flops.get(later, 0) for later in line.nodes[heaviest + 1 :])
    found = {change: _ratio_elsewhere(line, totals, placement) for change, placement in others.items()}
    better = tuple((change, other) for change, other in found.items() if other is not None and other < ratio - GAIN)
    who = f"{'rank' if row.folded else 'stage'} {index}"
    return Overweight(who, ratio, node.name, origin.module if origin else "", share, is_head, better)


def _ratio(row: Row, edges: Sequence[int]) -> tuple[float, int]:
    """The heaviest stage, or rank of a V, over the mean, and which it is."""
    loads = row.rank_loads(edges) if row.folded else row.stage_loads(edges)
    whole = sum(loads)
    return (max(loads) * len(loads) / whole if whole else 1.0), loads.index(max(loads))


def _ratio_elsewhere(line: Line, totals: Sequence[float], ranks_of: Sequence[int]) -> float | None:
    try:
        return _ratio(Row(totals, ranks_of), choose_edges(line, totals, ranks_of, Limits()))[0]
    except PartitionError:
        return None
