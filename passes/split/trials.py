"""Trials: two calls of one operator that differ in memory layout, run on random numbers and compared bit by bit.

A kernel that vectorises other elements, or sums in another order, rounds some per cent of random numbers differently.
"""

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.passes.graph.storage import tensors_of
from zbcompile.passes.torch_private import outside_of_trace

ELEMENTS = 1 << 14  # at least so many results are compared
TRIALS = (4, 256)


def equal_in_trials(one: Node, other: Node) -> bool:
    """Whether the calls `one` and `other` of an aten operator, or of its forms that do and do not work in place, give
    equal bits for equal values, each with operands of its own layout."""
    if _shapes(one) != _shapes(other) or not str(one.target).startswith("aten."):
        return False
    made = tensors_of(one.meta["val"])[0]
    count = min(max(ELEMENTS // max(made.numel(), 1), TRIALS[0]), TRIALS[1])
    with outside_of_trace(), torch.random.fork_rng():
        return all(_equal(one, other, seed) for seed in range(count))


def _shapes(node: Node) -> Any:
    return [(v.dtype, v.shape) for read in node.all_input_nodes for v in tensors_of(read.meta["val"])]


def _equal(one: Node, other: Node, seed: int) -> bool:
    ours, theirs = (tensors_of(_run(node, seed)) for node in (one, other))
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=False))


def _run(node: Node, seed: int) -> Any:
    torch.manual_seed(seed)
    args, kwargs = map_arg((node.args, node.kwargs), lambda read: _random(read.meta["val"]))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _random(like: Any) -> Any:
    """Random numbers with the layout of `like`: the same for one seed, whatever the layout."""
    if not isinstance(like, torch.Tensor):
        return like
    once = [1 if stride == 0 else size for size, stride in zip(like.shape, like.stride(), strict=True)]
    held = torch.empty_strided(once, like.stride(), dtype=like.dtype, device=like.device)
    return held.copy_(torch.randn(once) if like.is_floating_point() else torch.zeros(once)).expand(like.shape)
