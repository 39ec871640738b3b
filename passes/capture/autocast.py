"""Casts of parameters by autocast: eager makes one per parameter and outermost autocast region, and keeps it.

The gradients of two uses of a weight inside one region are then summed in the low precision, before the one cast back.
"""

import itertools
from collections.abc import Hashable, Iterator

import torch
from torch.fx import GraphModule, Node

from zbcompile.passes.torch_private import AUTOCAST, AUTOCAST_REGION, annotate_node, written_as


def number_autocast_regions(module: GraphModule, device: str) -> None:
    """Record on every node the outermost autocast region that contains it, if any."""
    _number(module, -1 if torch.is_autocast_enabled(device) else None, itertools.count())


def _number(module: GraphModule, around: int | None, numbers: Iterator[int]) -> None:
    for node in module.graph.nodes:
        number = around
        if number is None and node.target is AUTOCAST_REGION:
            number = next(numbers)
        if number is not None:
            annotate_node(node, AUTOCAST, number)
        for argument in node.all_input_nodes:
            child = getattr(module, str(argument.target), None) if argument.op == "get_attr" else None
            if isinstance(child, GraphModule):
                _number(child, number, numbers)


def autocast_key(node: Node) -> Hashable | None:
    """A key shared by casts that eager's autocast makes only once; None for anything else, also casts of the model."""
    region = node.meta.get("autocast")
    if region is None or str(node.target) != "aten._to_copy.default":
        return None
    source = node.args[0]
    if not isinstance(source, Node) or source.op != "placeholder" or source.meta["slot"].kind != "parameter":
        return None
    return region, source, node.kwargs.get("dtype")


def is_autocasts(node: Node) -> bool:
    """Whether autocast, not the model, made a cast node: it then stems from an operation that is not a cast."""
    written = written_as(node)
    return bool(written) and not written.startswith(("aten.to.", "aten._to_copy", "aten.type_as"))
