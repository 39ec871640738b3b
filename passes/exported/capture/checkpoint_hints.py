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
from torch import Tensor

from zbcompile.passes.exported.torch_private import (
    ANNOTATIONS,
    annotations_of,
    replaced_checkpoint_regions,
)

CHECKPOINT = "checkpoint"  # key of an annotation: number of the outermost region


@contextlib.contextmanager
def checkpoint_hints() -> Iterator[None]:
    """Context in which nodes of checkpointed regions are annotated with the region's number."""
    numbers = itertools.count()

    def region(*args: Any, **kwargs: Any) -> Iterator[None]:
        with _numbered(numbers):
            yield

    class ReentrantRegion:
        @staticmethod
        def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            # Eager's region is an autograd.Function: without a tensor that requires gradients
            # among its arguments, nothing in it gets any.
            trains = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
            with _numbered(numbers), torch.set_grad_enabled(trains and torch.is_grad_enabled()):
                return function(*args)

    with replaced_checkpoint_regions(region, ReentrantRegion):
        yield


def checkpoint_region(node: torch.fx.Node) -> int | None:
    """Returns the number of the checkpointed region of a forward node, or None."""
    return annotations_of(node).get(CHECKPOINT)


@contextlib.contextmanager
def _numbered(numbers: Iterator[int]) -> Iterator[None]:
    outer = fx_traceback.current_meta.get(ANNOTATIONS, {}).get(CHECKPOINT)
    with fx_traceback.annotate({CHECKPOINT: next(numbers) if outer is None else outer}):
        yield
