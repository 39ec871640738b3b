"""Runs every pass of this rank once on zeros before the first message of a program.

Kernels that are built at their first call are then built on all ranks in parallel. Without that the
ranks build them one after the other, because each needs the messages of the one before.
"""

import warnings
from collections.abc import Collection, Iterable
from typing import Any

import torch

from zbcompile.engine.stage import CompiledStage
from zbcompile.passes import gpu
from zbcompile.passes.graph.roles import SAVED, Slot


def warm_up(stages: Iterable[CompiledStage], passes: Collection[tuple[str, int]]) -> None:
    """Runs those of `passes`, (name, stage), that these stages have, and all passes of shards of an
    output layer, once each on zeros.

    Parameters, buffers, gradients and the state of random generators are as before. An exception
    becomes a warning, because a pass may refuse zeros.
    """
    for stage in stages:
        saved: dict[Slot, Any] = {}
        for name in stage.calls:
            if stage.index >= 0 and (name, stage.index) not in passes:
                continue
            try:
                no_autocast = torch.autocast(stage.device.type, enabled=False)
                with gpu.forked_generators(stage.device), torch.no_grad(), no_autocast:
                    _run(stage, name, saved)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}".partition("\n")[0]
                warnings.warn(
                    f"warm-up: {name} of stage {stage.index} failed on zeros ({problem}). The step"
                    " runs it for the first time; warm_up=False does not try.",
                    stacklevel=2,
                )


def _run(stage: CompiledStage, name: str, saved: dict[Slot, Any]) -> None:
    """Runs a pass on the values that earlier ones saved for it, and otherwise on zeros.

    A saved value may have another dtype than its fake tensor (of attention under bfloat16). What
    the pass saves is added to `saved`.
    """
    piece = stage.program.pieces[name]
    values = []
    for slot, node in piece.arguments:
        value = saved.get(slot, stage.resident.get(slot))
        if value is None or value.is_meta:  # rows of other ranks are gathered for a run
            value = _zeros(node.meta["val"], stage.device)
        values.append(value)
    results = zip(piece.outputs, stage.calls[name].run(values), strict=True)
    saved.update((slot, value) for slot, value in results if slot.role == SAVED)


def _zeros(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns zeros with the shape, strides and dtype of a fake tensor."""
    sizes = zip(like.shape, like.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in sizes) if like.numel() else 0
    zeros = torch.zeros(count, dtype=like.dtype, device=device)
    return zeros.as_strided(like.shape, like.stride())
