"""The notice about cuts that leave one rank with much more work than the others."""

from collections.abc import Sequence

from zbcompile.passes.cost.node_cost import node_flops
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.partition.balance import LoadRow
from zbcompile.passes.partition.cut_points import ForwardLine

WORTH_SAYING = 1.2  # the heaviest rank over the mean


def explain_overweight(
    line: ForwardLine,
    loads: Sequence[float],
    row: LoadRow,
    cuts: Sequence[int],
    sharded: bool = False,
) -> str:
    """Returns which rank carries too much, its heaviest operation and remedies; "" if none does.

    `sharded` says that the output layer is sharded already.
    """
    ranks = row.rank_loads(cuts)
    rank = ranks.index(max(ranks))
    ratio = ranks[rank] * len(ranks) / (sum(ranks) or 1.0)
    if ratio < WORTH_SAYING:
        return ""
    spans = zip(row.ranks_of, [0, *cuts], [*cuts, len(loads)], strict=True)
    indices = [index for owner, start, end in spans if owner == rank for index in range(start, end)]
    heaviest = max(indices, key=loads.__getitem__)
    node = line.nodes[heaviest]
    origin = origin_of(node)
    place = f" in {origin.module}" if origin and origin.module else ""
    remedies = ["fewer ranks or chunks, or a deeper model"]
    if not row.folded:
        remedies.append("a V schedule such as zb-v")
    is_last = not any(map(node_flops, line.nodes[heaviest + 1 :]))  # product before the loss
    if is_last and not sharded:
        remedies.append(
            "vocab=1, which shards an output layer over all ranks (docs/partitioning.md)"
        )
    return (
        f"rank {rank} carries {ratio:.2f} times the mean load, and a step is as slow as its "
        f"heaviest rank: {node.name}{place} alone is {loads[heaviest] / ranks[rank]:.0%} of its "
        f"load. To change that: {'; or '.join(remedies)}."
    )
