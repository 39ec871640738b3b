"""Checkpoint hints: torch.utils.checkpoint becomes an annotation that the recompute pass reads.

Inside of a trace both kinds of checkpoint run their function once. What to recompute is decided
later, per stage.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch.fx
import torch.fx.traceback as fx_traceback
import torch.utils.checkpoint
from torch import Tensor

from zbcompile.passes.capture.unsupported import SHARED_WITH_A_REENTRANT_REGION
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.torch_private import (
    ANNOTATIONS,
    CHECKPOINT_GENERATOR,
    annotations_of,
    replaced,
)

CHECKPOINT = "checkpoint"  # key of an annotation: number of the outermost region
REENTRANT = "reentrant"  # key of an annotation: number of the outermost reentrant region


@contextlib.contextmanager
def checkpoint_hints() -> Iterator[None]:
    """Context in which nodes of checkpointed regions are annotated with the region's number."""
    numbers, regions = itertools.count(), itertools.count()

    def region(*args: Any, **kwargs: Any) -> Iterator[None]:
        with _numbered(CHECKPOINT, numbers):
            yield

    class ReentrantRegion:
        @staticmethod
        def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            # Eager's region is an autograd.Function: without a tensor that requires gradients
            # among its arguments, nothing in it gets any.
            trains = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
            trains = trains and torch.is_grad_enabled()
            grad_mode = torch.set_grad_enabled(trains)
            with _numbered(CHECKPOINT, numbers), _numbered(REENTRANT, regions), grad_mode:
                return function(*args)

    checkpoint = torch.utils.checkpoint
    with (
        replaced(checkpoint, CHECKPOINT_GENERATOR, region),
        replaced(checkpoint, "CheckpointFunction", ReentrantRegion),
    ):
        yield


def checkpoint_region(node: torch.fx.Node) -> int | None:
    """Returns the number of the checkpointed region of a forward node, or None."""
    return annotations_of(node).get(CHECKPOINT)


def reentrant_calls(step: StepGraph) -> list[str]:
    """Returns sentences about parameters that are used in a reentrant region and outside of it.

    Eager mode adds to `.grad` once per reentrant region, and a graph once per microbatch.
    """
    backward = step.backward_nodes()
    sentences = []
    for name in step.gradients:
        readers = [node for node in step.parameters[name].users if node not in backward]
        regions = {annotations_of(node).get(REENTRANT) for node in readers}
        if len(regions) > 1:
            sentences.append(SHARED_WITH_A_REENTRANT_REGION.format(name=name))
    return sentences


@contextlib.contextmanager
def _numbered(key: str, numbers: Iterator[int]) -> Iterator[None]:
    outer = fx_traceback.current_meta.get(ANNOTATIONS, {}).get(key)
    with fx_traceback.annotate({key: next(numbers) if outer is None else outer}):
        yield
