"""The real values, during a trace, of what depends on the inputs of forward alone: they can be asked about.

A trace runs on tensors without values. Its operations so far are run again, on the microbatch at hand, without those
that a parameter, a buffer or a random number takes part in.
"""

import contextlib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.torch_private import OpOverload, is_in_place, is_part_of_vmap, outside_of_trace, storage_key

OWN_LIBRARY = "zbcompile"
UNKNOWN = object()


class InputValues:
    """Values by node. `known` are those of the inputs; a node that is not in `values` depends on more than inputs, one
    that is UNKNOWN there could not be computed."""

    def __init__(self, known: Mapping[Node, Any]) -> None:
        self.values: dict[Node, Any] = dict(known)
        self._other: set[Node] = set()  # depends on a parameter, a buffer or a random number
        self._memory: set[int] = set()  # the storages of these: an operation in place may have written into them

    def of(self, node: Node, root: torch.nn.Module) -> Any:
        """The value of a node of the graph that is being traced; None if it depends on more than inputs."""
        with outside_of_trace():
            for each in node.graph.nodes:
                if each not in self.values and each not in self._other:
                    self._visit(each, root)
        return None if self._is_other(node) else self.values[node]

    def _visit(self, node: Node, root: torch.nn.Module) -> None:
        if self._is_computable(node, root):
            self.values[node] = self._computed(node, root)
            return
        self._other.add(node)
        written = [node, *node.all_input_nodes] if is_in_place(node.target) else [node]
        for each in written:
            self._memory |= set(_storages(each))

    def _is_computable(self, node: Node, root: torch.nn.Module) -> bool:
        if node.op == "get_attr":
            return isinstance(getattr(root, str(node.target), None), torch.Tensor)
        if node.op != "call_function" or is_random(node) or any(map(self._is_other, node.all_input_nodes)):
            return False
        if isinstance(node.target, OpOverload):
            return node.target.namespace != OWN_LIBRARY  # such an operator is the call of an autograd.Function
        return node.target is operator.getitem or is_part_of_vmap(node.target)

    def _is_other(self, node: Node) -> bool:
        return node not in self.values or not self._memory.isdisjoint(_storages(node))

    def _computed(self, node: Node, root: torch.nn.Module) -> Any:
        if node.op == "get_attr":
            return getattr(root, str(node.target))
        if any(self.values[each] is UNKNOWN for each in node.all_input_nodes):
            return UNKNOWN
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)  # type: ignore[misc,arg-type]
        try:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # answers of another rank's microbatch may lead where this one's values do not fit
            return UNKNOWN


def _storages(node: Node) -> Iterator[int]:
    for tensor in tensors_of(node.meta.get("val")):
        with contextlib.suppress(NotImplementedError, RuntimeError):  # values inside a vmap have no storage
            yield storage_key(tensor)
