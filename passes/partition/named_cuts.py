"""Cuts by name: a module (cut before its first operation) or an operation of the graph (cut after it)."""

from collections.abc import Sequence
from difflib import get_close_matches

from torch.fx import Node

from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.storage import is_view
from zbcompile.passes.partition.liveness import Line
from zbcompile.passes.torch_private import module_stack


def edges_named(line: Line, names: Sequence[str], stages: int) -> list[int]:
    """The cuts of the line that `names` stand for, as numbers of nodes before each cut, ascending.

    Raises PartitionError if names are not in the model, if the line cannot be cut at them, or if their number is wrong.
    """
    if len(names) != stages - 1:
        raise PartitionError(
            f"balance= names {len(names)} cut{'s' * (len(names) != 1)}; the schedule has {stages} stages, which need "
            f"{stages - 1}."
        )
    chosen: dict[int, str] = {}
    for name in names:
        edge = _edge(line, name)
        if edge in chosen:
            raise PartitionError(f"balance= names the same cut twice: {chosen[edge]!r} and {name!r}.")
        chosen[edge] = name
    return sorted(chosen)


def _edge(line: Line, name: str) -> int:
    for i, node in enumerate(line.nodes):
        if node.name == name:
            return _allowed(line, i + 1, name)
        if any(path == name or path.startswith(f"{name}.") for path in module_paths(node)):
            return _allowed(line, i, name)
    known = dict.fromkeys(path for node in line.nodes for path in module_paths(node))
    near = get_close_matches(name, [*known, *(node.name for node in line.nodes)], n=3)
    raise PartitionError(
        f"balance= names {name!r}, which is neither a module that the training step runs nor an operation of its graph"
        + (f"; near it are {', '.join(near)}." if near else ". Expected a module's path, such as 'blocks.2'.")
    )


def _allowed(line: Line, edge: int, name: str) -> int:
    """The nearest place at or before `edge` where the line can be cut, if only views lie between."""
    place = edge - 1
    while place > 0 and not line.allowed[place] and is_view(line.nodes[place]):
        place -= 1
    if 0 <= place < len(line.allowed) and line.allowed[place]:
        return place + 1
    nearest = min((i for i, ok in enumerate(line.allowed) if ok), key=lambda i: abs(i - place), default=None)
    instead = "" if nearest is None else f" The nearest place is after {line.nodes[nearest].name}."
    raise PartitionError(
        f"balance= asks for a cut at {name!r}, where no gradient flows back, or a tuple or a view would cross.{instead}"
    )


def module_paths(node: Node) -> list[str]:
    """The modules that a node ran in, outermost first: `blocks`, `blocks.2`, `blocks.2.mlp`."""
    stack = module_stack(node).values()
    paths = [str(path).partition("@")[0] for path, _ in stack]  # @1: the second call of a module
    return [path.removeprefix("model.") for path in paths if path.startswith("model.")]
