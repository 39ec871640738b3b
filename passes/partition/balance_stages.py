"""Balance: chooses the cuts that make the heaviest stage, or in a V the heaviest rank, light."""

from collections.abc import Sequence
from itertools import accumulate
from statistics import median

from torch.fx import Node

from zbcompile.passes.capture.backward_marks import forward_number
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.node_cost import node_cost
from zbcompile.passes.partition.balance import LoadRow, best_cuts, heaviest_piece
from zbcompile.passes.partition.cut_points import ForwardLine
from zbcompile.passes.step_graph import StepGraph

THINNER = 1.05  # thinner cuts may weigh this factor more than the best balance
WIDEST = 16  # times the median: wider cuts, such as those behind logits, are the last resort


def balanced_cuts(step: StepGraph, line: ForwardLine, ranks_of: Sequence[int]) -> tuple[int, ...]:
    """Returns the cuts of `line`, as numbers of nodes before each, one less than stages.

    Args:
        ranks_of: The rank of each stage: `(0, 1, 2, 3)` linear, `(0, 1, 0, 1)` looped,
            `(0, 1, 1, 0)` in a V.

    Among the cuts within 5 % of the best balance, the widest of the chosen cuts carries the fewest
    bytes, and then each cut as few as its neighbours allow.

    Raises:
        PartitionError: The model has too few places where it can be cut.
    """
    stages = len(ranks_of)
    if len(line.cuts) < stages - 1:
        raise PartitionError(
            f"the model can be cut at {len(line.cuts)} places; {stages} stages need {stages - 1}. "
            f"Use fewer stages or a deeper model.{_wide_buffers(line)}"
        )
    if stages == 1:
        return ()
    totals = [0.0, *accumulate(node_loads(step, line))]
    limit = WIDEST * median(line.crossing_bytes[cut] for cut in line.cuts)
    places = [cut for cut in line.cuts if line.crossing_bytes[cut] <= limit]
    places = places if len(places) >= stages - 1 else list(line.cuts)
    frame = [0, *places, len(line.nodes)]
    row = LoadRow(totals, tuple(ranks_of), heaviest_piece(totals, frame))
    best = best_cuts(row, frame)
    assert best is not None
    limit, cuts = best[0] * THINNER, best[1]
    widths = sorted({line.crossing_bytes[cut] for cut in places})
    low, high = 0, len(widths) - 1
    while low <= high:  # the smallest width that leaves cuts within the limit
        middle = (low + high) // 2
        thin = [cut for cut in places if line.crossing_bytes[cut] <= widths[middle]]
        found = best_cuts(row, [0, *thin, len(line.nodes)]) if len(thin) >= stages - 1 else None
        if found is not None and found[0] <= limit:
            cuts, high = found[1], middle - 1
        else:
            low = middle + 1
    return _thinned(line, row, list(cuts), limit)


def _thinned(line: ForwardLine, row: LoadRow, cuts: list[int], limit: float) -> tuple[int, ...]:
    """Returns the cuts, each moved to the place with the fewest bytes, and next the least change of
    load, that keeps the balance within `limit`."""
    for index, cut in enumerate(cuts):
        before, after = [0, *cuts][index], [*cuts, len(line.nodes)][index + 1]
        width = line.crossing_bytes[cut]
        narrower = [
            (line.crossing_bytes[place], abs(row.totals[place] - row.totals[cut]), place)
            for place in line.cuts
            if before < place < after and line.crossing_bytes[place] < width
        ]
        for *_, place in sorted(narrower):
            moved = [*cuts[:index], place, *cuts[index + 1 :]]
            if row.heaviest(moved) <= limit:
                cuts = moved
                break
    return tuple(cuts)


def _wide_buffers(line: ForwardLine) -> str:
    """Returns a sentence about buffers that keep much of the model on one stage, or ""."""
    wide = [name for name, (a, b) in line.buffer_spans.items() if b - a > len(line.nodes) // 4]
    if not wide:
        return ""
    return (
        f" The buffer {wide[0]!r} is read and written far apart, and everything in between is "
        "computed on one stage: read it where it is written."
    )


def node_loads(step: StepGraph, line: ForwardLine) -> list[float]:
    """Returns the cost of each node of the line with that of its backward, in FLOPs."""
    position_of: dict[int, int] = {}
    loads = []
    for index, node in enumerate(line.nodes):
        loads.append(node_cost(node))
        position_of.setdefault(node.meta.get("seq_nr", -1), index)
    for node in step.backward_nodes():
        index = position_of.get(_number(node), -1)
        if index >= 0:
            loads[index] += node_cost(node)
    return loads


def _number(node: Node) -> int:
    number = forward_number(node)
    return -1 if number is None else number
