"""Checks around the passes of a step: for the operation that introduces a NaN or an infinity, found by running graphs
operation by operation, and for a user's operators that draw random numbers without saying so, which no seed would
reach."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Interpreter, Node
from torch.fx.node import map_arg

from zbcompile.backends.types import Run
from zbcompile.errors import PipelineError
from zbcompile.passes import gpu
from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.graph.process_groups import is_under_way, is_wait
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.split.split import Piece
from zbcompile.passes.torch_private import OpOverload
from zbcompile.runtime.stage_plan import CompiledStage, Tensors


def inspected(stage: CompiledStage) -> CompiledStage:
    """`stage` with every pass checked: FloatingPointError at the first operation that introduces a NaN or an infinity,
    and before any operation if there is a NaN in the batch, a parameter or a buffer."""
    return stage.with_runs({name: checked(stage.index, piece) for name, piece in stage.program.pieces.items()})


def checked(stage: int, piece: Piece) -> Run:
    """A pass under inspection, called as the boxed graph would be: with a list, which it empties."""

    def run(values: Tensors) -> Sequence[torch.Tensor]:
        given = list(values)
        values.clear()
        return _Inspector(stage, piece).run(*given)  # type: ignore[no-any-return]

    return run


ROOTS = ("input", "parameter", "buffer")  # a NaN in anything else that a pass reads was made by a pass


class _Inspector(Interpreter):
    """Runs a pass and reports its first NaN that no input has. Infinities are often meant (a mask of -inf): one is
    reported only if all inputs are finite."""

    def __init__(self, stage: int, piece: Piece) -> None:
        super().__init__(piece.module)
        self.extra_traceback = False  # the message says where
        self._place = f"{piece.name} of stage {stage}"
        self._slots = dict(zip(piece.module.graph.find_nodes(op="placeholder"), piece.inputs, strict=True))
        self._sent: dict[Node, set[str]] = {}  # by collective under way: what occurs in its inputs

    def run_node(self, n: Node) -> Any:
        read = _kinds(map_arg((n.args, n.kwargs), lambda node: self.env[node]))
        if is_under_way(n):  # its result is there once somebody has waited for it
            self._sent[n] = read
            return super().run_node(n)
        read = set().union(*(self._sent.get(each, read) for each in n.all_input_nodes)) if is_wait(n) else read
        result = super().run_node(n)
        made = _kinds(result)
        if n in self._slots and self._slots[n].kind in ROOTS and "nan" in made:
            raise FloatingPointError(f"{self._place} receives a NaN in {self._slots[n].kind} {self._slots[n].name}")
        if n.op == "call_function" and ("nan" in made - read or ("inf" in made and not read)):
            origin = origin_of(n)
            line = f", for {origin.owner}: {origin.text}" if origin else ""
            found = "a NaN" if "nan" in made else "an infinity"
            raise FloatingPointError(f"{found} first appears in {self._place}, in {n.target} ({n.name}){line}")
        return result


def _kinds(values: Any) -> set[str]:
    """Which of "nan" and "inf" occur in tensors and numbers."""
    if isinstance(values, torch.Tensor):
        if not values.is_floating_point():
            return set()
        return {kind for kind, test in (("nan", torch.isnan), ("inf", torch.isinf)) if bool(test(values).any())}
    if isinstance(values, float):
        return {kind for kind, test in (("nan", math.isnan), ("inf", math.isinf)) if test(values)}
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return set()
    return {kind for value in values for kind in _kinds(value)}


TORCHS = ("aten", "prim", "prims", "zbcompile", "higher_order", "_c10d_functional", "_c10d_functional_autograd")


def with_draws_refused(stage: CompiledStage) -> CompiledStage:
    """`stage` with passes that raise PipelineError if an operator that is not torch's draws from torch's generator and
    has no tag that says so. Stages without foreign operators stay as they are. A pair of passes is still one graph and
    is not watched: each of its passes also runs alone, at the beginning or the end of a step."""
    watched = {name: found for name, piece in stage.program.pieces.items() if (found := _operators(piece))}
    runs = {name: _watched(stage.calls[name].run, found, stage.device) for name, found in watched.items()}
    return replace(stage.with_runs(runs), mergeable=stage.mergeable) if runs else stage


def _operators(piece: Piece) -> list[str]:
    """The foreign operators that may draw; none in a pass known to draw, where the generator stands as in eager."""
    nodes = [node for node in piece.module.graph.nodes if isinstance(node.target, OpOverload)]
    others = sorted({str(node.target) for node in nodes if node.target.namespace not in TORCHS})
    return [] if any(map(is_random, nodes)) else others


def _watched(run: Run, operators: Sequence[str], device: torch.device) -> Run:
    def watched(values: Tensors) -> Sequence[torch.Tensor]:
        before = gpu.generator_state(device)
        results = run(values)
        if not torch.equal(gpu.generator_state(device), before):
            raise PipelineError(
                f"{' or '.join(operators)} draws random numbers, which its tags do not say, so that no microbatch has "
                "a seed for it. Define it with tags=torch.Tag.nondeterministic_seeded."
            )
        return results

    return watched
