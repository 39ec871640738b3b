"""Ten-line versions of clever passes: each says what its file computes, and a test compares the
two."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zbcompile.passes.recompute.saved_values import Candidates
from zbcompile.passes.stage.pass_graph import PassGraph


def every_choice(candidates: Candidates) -> Iterator[tuple[int, int]]:
    """`zbcompile.passes.recompute.saved_values`: bytes and cost of every set of kept
    values from which the backward's can be made; the best within a budget of bytes is the one of
    least cost."""
    for flags in itertools.product((False, True), repeat=len(candidates.bytes)):
        saved = {value for value, flag in zip(candidates.bytes, flags, strict=True) if flag}
        remade: set[Any] = set()
        missing = [value for value in candidates.backward_inputs if value not in saved]
        while missing and missing[-1] in candidates.cost:
            value = missing.pop()
            new = () if value in remade else candidates.inputs[value]
            remade.add(value)
            missing += [argument for argument in new if argument not in saved]
        if not missing:
            yield (
                sum(candidates.bytes[value] for value in saved),
                sum(candidates.cost[value] for value in remade),
            )


def one_after_the_other(
    first: PassGraph,
    inputs: Sequence[torch.Tensor],
    second: PassGraph,
    requested: Sequence[torch.Tensor],
) -> tuple[Any, Any]:
    """`zbcompile.passes.stage.overlap`: what both halves of a pair return, in whatever order they
    run."""
    return first.module(*inputs), second.module(*requested)
