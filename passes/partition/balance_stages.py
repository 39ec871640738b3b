"""Balance: chooses the cuts that make the heaviest stage, or in a V the heaviest rank, light."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from zbcompile.passes.capture.backward_marks import forward_number
from zbcompile.passes.cost.hardware import Hardware
from zbcompile.passes.cost.node_cost import node_seconds
from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.fx import operator_name
from zbcompile.passes.partition.balance import LoadRow, best_cuts, heaviest_piece
from zbcompile.passes.partition.cut_points import ForwardLine
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.torch_private import module_paths

TOLERANCE = 1.05  # cuts may be this much heavier than the best ones if fewer bytes cross them
EVEN_SHARE = 0.55  # of the load of a rank in a V: the most that one stage has, if possible
MESSAGE_SHARE = 0.5  # of a mean stage's time that messages across a cut may take


def balanced_cuts(
    step: StepGraph, line: ForwardLine, ranks_of: Sequence[int], hardware: Hardware
) -> tuple[int, ...]:
    """Returns the cuts of `line`, as numbers of nodes before each, one less than stages.

    Args:
        ranks_of: The rank of each stage: `(0, 1, 2, 3)` linear, `(0, 1, 0, 1)` looped,
            `(0, 1, 1, 0)` in a V.
        hardware: The machine whose seconds are balanced.

    Where messages would take more than half the time of a mean stage there is no cut, if enough
    other places are left. With the others the heaviest stage, in a V the heaviest rank, is within
    5 % of the lightest possible. Within this tolerance the cuts lie at equal places of equal layers
    if possible, else as few bytes as possible cross the widest of them, and then each of them.

    Raises:
        PartitionError: The model has too few places where it can be cut.
    """
    stages = len(ranks_of)
    if len(line.cuts) < stages - 1:
        written = [*step.buffer_updates][:3]
        raise PartitionError(
            f"the model can be cut at {len(line.cuts)} places; {stages} stages need {stages - 1}. "
            "Use fewer stages or a deeper model."
            + bool(written)
            * " All between the first and the last use of a buffer that forward "
            f"writes, such as {written}, is on one stage: read it where it is written."
        )
    if stages == 1:
        return ()
    totals = [0.0, *accumulate(node_loads(step, line, hardware))]
    places = _narrow_places(line, totals[-1] / stages, stages, hardware)
    row = LoadRow(totals, tuple(ranks_of), heaviest_piece(totals, [0, *places, len(line.nodes)]))
    best = best_cuts(row, [0, *places, len(line.nodes)])
    assert best is not None
    limit = best[0] * TOLERANCE
    for share in (EVEN_SHARE, row.chunk_share) if row.folded else (row.chunk_share,):
        cuts = _narrow_cuts(line, replace(row, chunk_share=share), places, limit)
        if cuts is not None:
            return cuts
    return tuple(best[1])


def _narrow_cuts(
    line: ForwardLine, row: LoadRow, places: Sequence[int], limit: float
) -> tuple[int, ...] | None:
    """Returns cuts within `limit` that few bytes cross; None if there are none."""

    def lightest(candidates: Sequence[int]) -> list[int] | None:
        best = best_cuts(row, [0, *candidates, len(line.nodes)])
        return best[1] if best is not None and best[0] <= limit else None

    if (cuts := lightest(places)) is None:
        return None
    width = line.crossing_bytes
    equal = filter(None, map(lightest, _places_by_layer(line, places)))
    ranked = [
        (max(width[cut] for cut in candidate), row.heaviest(candidate), candidate)
        for candidate in equal
    ]
    if ranked:
        return tuple(min(ranked)[-1])
    widths = sorted({width[place] for place in places})
    low, high = 0, len(widths) - 1
    while low <= high:  # the smallest width that leaves cuts within the limit
        middle = (low + high) // 2
        narrow = lightest([place for place in places if width[place] <= widths[middle]])
        if narrow is not None:
            cuts, high = narrow, middle - 1
        else:
            low = middle + 1
    return _narrowed(line, row, cuts, limit)


def _narrow_places(
    line: ForwardLine, stage_seconds: float, stages: int, hardware: Hardware
) -> Sequence[int]:
    """Returns the places across which messages take at most half the time of a mean stage; all if
    there are too few of them."""
    if (link := hardware.within) is None:
        return line.cuts
    limit = MESSAGE_SHARE * stage_seconds * link.bandwidth / 2  # an activation and its gradient
    places = [cut for cut in line.cuts if line.crossing_bytes[cut] <= limit]
    return places if len(places) >= stages - 1 else line.cuts


def _places_by_layer(line: ForwardLine, places: Sequence[int]) -> list[list[int]]:
    """Returns groups of places after the same operation of layers that are numbered in a list."""
    groups: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    counts: Counter[tuple[str, str]] = Counter()
    at = set(places)
    for index, node in enumerate(line.nodes):
        path = next(reversed(module_paths(node)), "")
        name = operator_name(node)
        counts[path, name] += 1
        layer = re.sub(r"\d+", "*", path, count=1)
        if index + 1 in at and layer != path:
            groups[layer, counts[path, name], name].append(index + 1)
    return list(groups.values())


def _narrowed(line: ForwardLine, row: LoadRow, cuts: list[int], limit: float) -> tuple[int, ...]:
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


def node_loads(step: StepGraph, line: ForwardLine, hardware: Hardware) -> list[float]:
    """Returns the seconds of each node of the line with its backward."""
    position_of: dict[int | None, int] = {}
    loads = []
    for index, node in enumerate(line.nodes):
        loads.append(node_seconds(node, hardware))
        position_of.setdefault(node.meta.get("seq_nr"), index)
    for node in step.backward_nodes():
        index = position_of.get(forward_number(node), -1)
        if index >= 0:
            loads[index] += node_seconds(node, hardware)
    return loads
