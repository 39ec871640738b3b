"""Cuts by name: before the first operation of a module, or after an operation of the graph."""

from collections.abc import Sequence
from difflib import get_close_matches

from torch.fx import Node

from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.fx import is_view, operator_name
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
    place = ahead = edge - 1
    allowed, last = line.allowed, len(line.nodes) - 1
    while place > 0 and not allowed[place] and _is_view(line.nodes[place]):
        place -= 1
    while 0 <= ahead < last and not allowed[ahead] and _is_view(line.nodes[ahead + 1]):
        ahead += 1
    if 0 <= place <= last and not allowed[place] and allowed[ahead]:
        place = ahead
    if 0 <= place <= last and allowed[place]:
        return place + 1
    places = [i for i, ok in enumerate(allowed) if ok]
    nearest = min(places, key=lambda i: abs(i - place), default=None)
    instead = ""
    if nearest is not None:
        instead = f" The nearest place is after {line.nodes[nearest].name}."
    raise PartitionError(
        f"balance= asks for a cut at {name!r}, where no gradient flows back, or a tuple or a view "
        f"would cross.{instead}"
    )


def _is_view(node: Node) -> bool:
    return is_view(node) or operator_name(node) == "getitem"
