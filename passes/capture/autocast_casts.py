"""Casts by autocast: eager mode casts a parameter once per region and keeps the result.

torch switches this cache off in traces, so every use casts again, and the gradients of the uses are
added in float32. Eager adds them in the low precision, before the one cast back. The difference of
a block that is applied five times is .4 % of its gradient.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.capture.backward_marks import forward_number, is_gradient_sum
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.torch_private import (
    TO_COPY,
    annotations_of,
    is_any_autocast_enabled,
    remove_node_annotation,
    replaced,
    set_node_annotation,
)

AUTOCAST = "autocast"  # key of an annotation: number of the autocast region
_CASTS = frozenset({"to", "type", "type_as", "bfloat16", "half", "float", "double"})


class AutocastRegions:
    """Annotates the nodes of functions inside of an autocast region with the region's number.

    Casts that the model itself calls are not annotated: eager mode does not cache them. Nor are
    those without gradients, as in the forward of a Function: its own backward has their gradients.
    """

    def __init__(self) -> None:
        self._region = 0

    @contextlib.contextmanager
    def numbered(self) -> Iterator[None]:
        """Context in which regions are numbered. Leaving the outermost one clears the cache."""
        clear = torch.clear_autocast_cache

        def clear_and_count() -> None:
            self._region += 1
            clear()

        with replaced(torch, "clear_autocast_cache", clear_and_count):
            yield
        remove_node_annotation(AUTOCAST)

    def annotate(self, function: Any) -> None:
        """Annotates the nodes that a call of `function` adds."""
        is_cached = is_any_autocast_enabled() and getattr(function, "__name__", "") not in _CASTS
        if is_cached and torch.is_grad_enabled():
            set_node_annotation(AUTOCAST, self._region)
        else:
            remove_node_annotation(AUTOCAST)


def merge_autocast_casts(step: StepGraph) -> None:
    """Merges equal casts of a trained parameter, and adds the gradients of their uses before the
    one cast back."""
    backward = step.backward_nodes()
    for name, gradient in step.gradients.items():
        groups: dict[Any, list[Node]] = {}
        for user in list(step.parameters[name].users):
            region = annotations_of(user).get(AUTOCAST)
            if user.target is TO_COPY and region is not None and user not in backward:
                groups.setdefault((region, user.kwargs.get("dtype")), []).append(user)
        for casts in groups.values():
            if len(casts) > 1:
                gradient = _merge(step, gradient, casts)
        step.gradients[name] = gradient
    step.refresh_output()
    step.remove_dead_nodes()


def _merge(step: StepGraph, gradient: Node | None, casts: list[Node]) -> Node | None:
    """Replaces the casts by the first one. Returns the parameter's gradient."""
    numbers = {cast.meta.get("seq_nr") for cast in casts}
    first, *further = casts
    for cast in further:
        cast.replace_all_uses_with(first)
        step.graph.erase_node(cast)
    if gradient is None:
        return None
    parts = _parts(gradient, gradient)
    members = [part for part in parts if part.target is TO_COPY and forward_number(part) in numbers]
    if len(members) < 2:
        return gradient
    # Autograd runs the backward of the one cast after those of all uses.
    total = members[0].args[0]
    for member in members[1:]:
        total = step.insert_sum(total, member.args[0], before=member)
    last = members[-1]
    last.args = (total, *last.args[1:])
    result, *rest = [part for part in parts if part not in members[:-1]]
    for part in rest:
        result = step.insert_sum(result, part, before=gradient)
    gradient.replace_all_uses_with(result)
    return result


def _parts(node: Node, root: Node) -> list[Node]:
    """Returns the nodes that autograd added to a gradient, in order."""
    if not is_gradient_sum(node) or (node is not root and len(node.users) > 1):
        return [node]
    first, second = node.args
    return [*_parts(first, root), *_parts(second, root)]  # type: ignore[arg-type]
