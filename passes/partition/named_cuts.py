"""Cuts by name: before the first operation of a module, or after an operation of the graph."""

from collections.abc import Sequence
from difflib import get_close_matches

from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.fx import is_part
from zbcompile.passes.partition.cut_points import ForwardLine
from zbcompile.passes.torch_private import module_paths


def edges_named(line: ForwardLine, names: Sequence[str], stages: int) -> list[int]:
    """Returns the cuts that `names` stand for, as numbers of nodes before each, ascending.

    Raises:
        PartitionError: A name is not in the model, the line cannot be cut there, or there are too
            many or too few names.
    """
    if len(names) != stages - 1:
        raise PartitionError(
            f"balance= names {len(names)} cut{'s' * (len(names) != 1)}; the schedule has {stages} "
            f"stages, which need {stages - 1}."
        )
    chosen: dict[int, str] = {}
    for name in names:
        edge = _edge(line, name)
        if edge in chosen:
            raise PartitionError(
                f"balance= names the same cut twice: {chosen[edge]!r} and {name!r}."
            )
        chosen[edge] = name
    return sorted(chosen)


def _edge(line: ForwardLine, name: str) -> int:
    for i, node in enumerate(line.nodes):
        if node.name == name:
            return _allowed(line, i + 1, name)
        if any(path == name or path.startswith(f"{name}.") for path in module_paths(node)):
            return _allowed(line, i, name)
    paths = dict.fromkeys(path for node in line.nodes for path in module_paths(node))
    near = get_close_matches(name, [*paths, *(node.name for node in line.nodes)], n=3)
    advice = f"; near it are {', '.join(near)}."
    if not near:
        advice = ". Expected a module's path, such as 'blocks.2'."
    raise PartitionError(
        f"balance= names {name!r}, which is neither a module that the training step runs nor an "
        f"operation of its graph{advice}"
    )


def _allowed(line: ForwardLine, edge: int, name: str) -> int:
    """Returns the nearest place before or after `edge` with only views in between."""
    nodes, allowed = line.nodes, set(line.cuts)
    before = after = edge
    while before > 1 and before not in allowed and is_part(nodes[before - 1]):
        before -= 1
    while 0 < after < len(nodes) and after not in allowed and is_part(nodes[after]):
        after += 1
    for place in (before, after):
        if place in allowed:
            return place
    instead = ""
    if line.cuts:
        nearest = min(line.cuts, key=lambda place: abs(place - edge))
        instead = f" The nearest place is after {nodes[nearest - 1].name}."
    raise PartitionError(
        f"balance= asks for a cut at {name!r}, where no gradient flows back, or a tuple or a view "
        f"would cross.{instead}"
    )
