"""Cuts by name: before the first operation of a module, or after an operation of the graph."""

from collections.abc import Sequence
from difflib import get_close_matches

from zbcompile.passes.errors import PartitionError
from zbcompile.passes.graph.fx import is_view
from zbcompile.passes.layout_strings import MARK
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
        if MARK.fullmatch(name):
            continue
        edge = _edge(line, name)
        if edge in chosen:
            raise PartitionError(
                f"balance= names the same cut twice: {chosen[edge]!r} and {name!r}."
            )
        chosen[edge] = name
    marks = [name for name in names if MARK.fullmatch(name)]
    layout = [_allowed(line, *_place_in_layout(line, name)) for name in marks]
    return sorted([*chosen, *layout])  # two equal cuts of a layout make an empty stage


def _edge(line: ForwardLine, name: str) -> int:
    for i, node in enumerate(line.nodes):
        if node.name == name:
            return _allowed(line, i + 1, name)
        if any(path == name or path.startswith(f"{name}.") for path in module_paths(node)):
            return _allowed(line, i, name)
    known = dict.fromkeys(path for node in line.nodes for path in module_paths(node))
    near = get_close_matches(name, [*known, *(node.name for node in line.nodes)], n=3)
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
    while place > 0 and not allowed[place] and is_view(line.nodes[place]):
        place -= 1
    while 0 <= ahead < last and not allowed[ahead] and is_view(line.nodes[ahead + 1]):
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


def _place_in_layout(line: ForwardLine, name: str) -> tuple[int, str]:
    """Returns the number of nodes before a cut of a layout string, and what stands there.

    Raises:
        PartitionError: The model has another number of layers.
    """
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
        layer = layers[int(index)]
        return next(i for i, own in enumerate(paths) if layer in own), layer
    predicting = [i for i, own in enumerate(paths) if any(".mtp" in f".{path}" for path in own)]
    if letter == "L":
        of_layers = (i for i, own in enumerate(paths) if {*own} & {*layers})
        return max(*predicting, *of_layers) + 1, "the output layer"
    if not predicting:
        raise PartitionError(
            "the layout has multi-token prediction (m), and no module of the model is called mtp."
        )
    return predicting[0], "mtp"


def _layers(paths: list[list[str]]) -> list[str]:
    """Returns the modules of the longest list of modules, in the order in which they run."""
    lists: dict[str, dict[str, None]] = {}
    for own in paths:
        for path in own:
            prefix, _, number = path.rpartition(".")
            if number.isdigit():
                lists.setdefault(prefix, {})[path] = None
    return max(map(list, lists.values()), key=len, default=[])
