"""Cuts by name: a module (cut before its first operation) or an operation of the graph (cut after it)."""

from collections.abc import Sequence
from difflib import get_close_matches

from zbcompile.passes.errors import PartitionError
from zbcompile.passes.exported.partition.cut_points import ForwardLine
from zbcompile.passes.graph.storage import is_view
from zbcompile.passes.layout_strings import MARK
from zbcompile.passes.torch_private import module_paths


def edges_named(line: ForwardLine, names: Sequence[str], stages: int) -> list[int]:
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
        if MARK.fullmatch(name):
            continue
        edge = _edge(line, name)
        if edge in chosen:
            raise PartitionError(
                f"balance= names the same cut twice: {chosen[edge]!r} and {name!r}."
            )
        chosen[edge] = name
    layout = [
        _allowed(line, *_place_in_layout(line, name)) for name in names if MARK.fullmatch(name)
    ]
    return sorted(
        [*chosen, *layout]
    )  # in a layout two equal cuts make an empty stage, which hands on what it gets


def _edge(line: ForwardLine, name: str) -> int:
    for i, node in enumerate(line.nodes):
        if node.name == name:
            return _allowed(line, i + 1, name)
        if any(path == name or path.startswith(f"{name}.") for path in module_paths(node)):
            return _allowed(line, i, name)
    known = dict.fromkeys(path for node in line.nodes for path in module_paths(node))
    near = get_close_matches(name, [*known, *(node.name for node in line.nodes)], n=3)
    raise PartitionError(
        f"balance= names {name!r}, which is neither a module that the training step runs nor an operation of its graph"
        + (
            f"; near it are {', '.join(near)}."
            if near
            else ". Expected a module's path, such as 'blocks.2'."
        )
    )


def _allowed(line: ForwardLine, edge: int, name: str) -> int:
    """The nearest place at `edge`, before it, or after it, where the line can be cut, if only views lie between."""
    place = ahead = edge - 1
    while place > 0 and not line.allowed[place] and is_view(line.nodes[place]):
        place -= 1
    while (
        0 <= ahead < len(line.nodes) - 1
        and not line.allowed[ahead]
        and is_view(line.nodes[ahead + 1])
    ):
        ahead += 1
    if 0 <= place < len(line.allowed) and not line.allowed[place] and line.allowed[ahead]:
        return ahead + 1
    if 0 <= place < len(line.allowed) and line.allowed[place]:
        return place + 1
    nearest = min(
        (i for i, ok in enumerate(line.allowed) if ok), key=lambda i: abs(i - place), default=None
    )
    instead = "" if nearest is None else f" The nearest place is after {line.nodes[nearest].name}."
    raise PartitionError(
        f"balance= asks for a cut at {name!r}, where no gradient flows back, or a tuple or a view would cross.{instead}"
    )


def _place_in_layout(line: ForwardLine, name: str) -> tuple[int, str]:
    """The number of nodes of the line before a cut that `cuts_of_layout` named, and what stands there. Raises
    PartitionError if the model has another number of layers."""
    match = MARK.fullmatch(name)
    assert match is not None
    letter, index, count = match.groups()
    paths = [module_paths(node) for node in line.nodes]
    layers = _layers(paths)
    if len(layers) != int(count):
        found = f"{layers[0]} to {layers[-1]}" if layers else "no list of modules"
        raise PartitionError(
            f"the layout has {count} layers (t), and the model runs {len(layers)}: {found}."
        )
    if letter == "t":
        return next(i for i, own in enumerate(paths) if layers[int(index)] in own), layers[
            int(index)
        ]
    predicting = [i for i, own in enumerate(paths) if any(".mtp" in f".{path}" for path in own)]
    if letter == "L":
        return max(
            *predicting, *(i for i, own in enumerate(paths) if {*own} & {*layers})
        ) + 1, "the output layer"
    if not predicting:
        raise PartitionError(
            "the layout has multi-token prediction (m), and no module of the model is called mtp."
        )
    return predicting[0], "mtp"


def _layers(paths: list[list[str]]) -> list[str]:
    """The modules of the longest list of modules, in the order in which they run."""
    lists: dict[str, dict[str, None]] = {}
    for own in paths:
        for path in own:
            prefix, _, number = path.rpartition(".")
            if number.isdigit():
                lists.setdefault(prefix, {})[path] = None
    return max(map(list, lists.values()), key=len, default=[])
