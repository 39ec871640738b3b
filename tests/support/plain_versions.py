"""Ten-line versions of clever passes: each says what its file computes, and a test compares the two."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.recompute.budget import Values
from zbcompile.passes.stage.piece import Piece


def every_choice(values: Values) -> Iterator[tuple[int, int]]:
    """`zbcompile.passes.recompute.budget`: bytes and time of every set of kept values from which the backward's can be
    made; the best within a budget of bytes is the one of least time."""
    for flags in itertools.product((False, True), repeat=len(values.bytes)):
        kept = {node for node, flag in zip(values.bytes, flags, strict=True) if flag}
        remade: set[Node] = set()
        missing = [node for node in values.wanted if node not in kept]
        while missing and missing[-1] in values.time:
            node = missing.pop()
            new = () if node in remade else values.inputs[node]
            remade.add(node)
            missing += [argument for argument in new if argument not in kept]
        if not missing:
            yield sum(values.bytes[node] for node in kept), sum(values.time[node] for node in remade)


def one_after_the_other(
    first: Piece, given: Sequence[torch.Tensor], second: Piece, asked: Sequence[torch.Tensor]
) -> tuple[Any, Any]:
    """`zbcompile.passes.stage.overlap`: what both halves of a pair return, in whatever order they run."""
    return first.module(*given), second.module(*asked)
