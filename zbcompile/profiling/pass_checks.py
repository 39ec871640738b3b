"""Finds the operation that introduces a NaN or an infinity, by running graphs operation by
operation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Interpreter, Node
from torch.fx.node import map_arg

from zbcompile.backends.types import Run
from zbcompile.engine.stage import CompiledStage, Tensors
from zbcompile.passes.graph.process_groups import is_async_collective, is_wait
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.torch_private import pytree


def inspected(stage: CompiledStage) -> CompiledStage:
    """Returns the stage with every pass checked.

    A pass raises FloatingPointError at the first operation that introduces a NaN or an infinity,
    and before any operation if there is a NaN in the batch, a parameter or a buffer.
    """
    calls = {
        name: replace(call, run=checked(stage.index, stage.program.pieces[name]))
        for name, call in stage.calls.items()
    }
    return replace(stage, calls=calls, mergeable=False)


def checked(stage: int, piece: PassGraph) -> Run:
    """Returns a function that runs a pass under inspection, called as the boxed graph is: with a
    list, which it empties."""

    def run(values: Tensors) -> Sequence[torch.Tensor]:
        inputs = list(values)
        values.clear()
        return _Inspector(stage, piece).run(*inputs)  # type: ignore[no-any-return]

    return run


# a NaN in anything else that a pass reads was made by a pass
ROOTS = ("batch", "parameter", "buffer")


class _Inspector(Interpreter):
    """Runs a pass and reports its first NaN that no input has. Infinities are often meant (a mask
    of -inf): one is reported only if all inputs are finite."""

    def __init__(self, stage: int, piece: PassGraph) -> None:
        super().__init__(piece.module)
        self.extra_traceback = False  # the message says where
        self._place = f"{piece.kind} of stage {stage}"
        self._slots = dict(
            zip(piece.module.graph.find_nodes(op="placeholder"), piece.inputs, strict=True)
        )
        self._sent: dict[Node, set[str]] = {}  # by collective under way: what occurs in its inputs

    def run_node(self, n: Node) -> Any:
        read = _kinds(map_arg((n.args, n.kwargs), lambda node: self.env[node]))
        if is_async_collective(n):  # its result is there once somebody has waited for it
            self._sent[n] = read
            return super().run_node(n)
        read = (
            set().union(*(self._sent.get(each, read) for each in n.all_input_nodes))
            if is_wait(n)
            else read
        )
        result = super().run_node(n)
        kinds = _kinds(result)
        if n in self._slots and self._slots[n].role in ROOTS and "nan" in kinds:
            raise FloatingPointError(
                f"{self._place} receives a NaN in {self._slots[n].role} {self._slots[n].name}"
            )
        if n.op == "call_function" and ("nan" in kinds - read or ("inf" in kinds and not read)):
            origin = origin_of(n)
            line = f", for {origin.owner}: {origin.text}" if origin else ""
            value = "a NaN" if "nan" in kinds else "an infinity"
            raise FloatingPointError(
                f"{value} first appears in {self._place}, in {n.target} ({n.name}){line}"
            )
        return result


def _kinds(values: Any) -> set[str]:
    """Returns which of "nan" and "inf" occur in tensors and numbers."""
    leaves = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor | float))
    tensors = [tensor for tensor in map(torch.as_tensor, leaves) if tensor.is_floating_point()]
    tests = {"nan": torch.isnan, "inf": torch.isinf}
    return {kind for kind, test in tests.items() if any(test(tensor).any() for tensor in tensors)}
