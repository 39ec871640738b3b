"""Refuse operators of a user that draw random numbers without saying so: their seeds would be anything."""

from collections.abc import Sequence

import torch

from zbcompile.backends.types import Run
from zbcompile.errors import PipelineError
from zbcompile.passes import gpu
from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.torch_private import OpOverload
from zbcompile.runtime.stage_plan import CompiledStage, Tensors

TORCHS = ("aten", "prim", "prims", "zbcompile", "higher_order", "_c10d_functional", "_c10d_functional_autograd")


def with_draws_refused(stage: CompiledStage) -> CompiledStage:
    """`stage`, whose passes raise PipelineError if an operator that is not torch's draws from torch's generator, but
    has no tag that says so. Stages without such an operator stay as they are."""
    watched = {name: found for name, piece in stage.program.pieces.items() if (found := _operators(piece))}
    runs = {name: _watched(stage.calls[name].run, found, stage.device) for name, found in watched.items()}
    return stage.with_runs(runs) if runs else stage


def _operators(piece: Piece) -> list[str]:
    """Those that may draw; none in a pass that is known to draw, in which the generator stands where eager's does."""
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
