"""Runs of graphs on synthetic data, measured. The data are random numbers, and indices that reach
everything that they index: indices that are all equal would read one row again and again, and leave
all experts but one without work.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes import gpu
from zbcompile.passes.graph.fx import argument_of, is_view, tensors_of
from zbcompile.passes.torch_private import OpOverload

WARM_UP = 2
RUNS = (5, 25)  # at least, at most
ENOUGH = 0.02  # stop early after this many seconds once RUNS[0] is reached


def device_of(nodes: Iterable[Node]) -> torch.device:
    """The device of what is computed: a number may be on the CPU."""
    devices = {tensor.device for node in nodes for tensor in tensors_of(node.meta.get("val"))}
    return next((device for device in devices if gpu.is_gpu(device)), torch.device("cpu"))


def run_seconds_in_turn(runs: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds of each run when all take turns: the mean of the middle half of its times, without
    interruptions."""
    clock = clock_of(gpu.is_available())
    for _ in range(WARM_UP):
        for run in runs:
            run()
    rounds: list[list[float]] = []
    while len(rounds) < RUNS[0] or (
        sum(map(sum, rounds)) < ENOUGH * len(runs) and len(rounds) < RUNS[1]
    ):
        ends = [clock()]
        for run in runs:
            run()
            ends.append(clock())
        rounds.append([end - begin for begin, end in pairwise(ends)])
    quarter = len(rounds) // 4
    return [
        mean(sorted(times)[quarter : len(times) - quarter]) for times in zip(*rounds, strict=True)
    ]


def clock_of(accelerated: bool) -> Callable[[], float]:
    """The clock for runs: if one thread of a CPU does all, its own time, which nothing else on the
    machine prolongs."""
    return time.perf_counter if accelerated or torch.get_num_threads() > 1 else time.thread_time


aten = torch.ops.aten
# Arguments of operators: what is indexed, the index, and the dimension or the argument that names
# it.
_INDEXED: dict[Any, tuple[str, str, int | str]] = {
    aten.embedding: ("weight", "indices", 0),
    **dict.fromkeys((aten.cross_entropy_loss, aten.nll_loss_nd), ("self", "target", 1)),
    **dict.fromkeys((aten.nll_loss_forward, aten.nll_loss_backward), ("self", "target", 1)),
    **dict.fromkeys((aten.gather, aten.index_select, aten.index_add), ("self", "index", "dim")),
    **dict.fromkeys((aten.scatter, aten.scatter_add), ("self", "index", "dim")),
}
_COUNTED: dict[Any, tuple[str, str]] = {
    aten.embedding_dense_backward: ("indices", "num_weights"),
    aten.one_hot: ("self", "num_classes"),
}
_BY_POSITION = (aten.index, aten.index_put)  # the first index is of dimension 0, and so on
Read = tuple[Node, Node]  # a value, or a view of it, and an operation that reads it


def values_like(node: Node) -> Any:
    """A value of the form that `node` has, as the operations that read it can take it."""
    value = torch.fx.node.map_aggregate(node.meta["val"], synthetic)
    if (
        not isinstance(value, torch.Tensor)
        or value.dtype not in (torch.int32, torch.int64)
        or not value.numel()
    ):
        return value
    reads = list(_reads_of(node))
    rows = [count for name, reader in reads if (count := _grouped_rows(name, reader))]
    if rows:  # experts that get equally many rows
        return value.copy_(
            torch.arange(1, value.numel() + 1).view(value.shape) * min(rows) // value.numel()
        )
    limits = [limit for name, reader in reads if (limit := _indexed_length(name, reader))]
    return value.copy_(torch.randint(min(limits), value.shape)) if limits else value


def synthetic(value: Any) -> Any:
    """Random numbers between 0 and 1; integers are 0 and masks let everything through."""
    if not isinstance(value, torch.Tensor):
        return value
    reach = 1 + sum(
        (size - 1) * stride
        for size, stride in zip(value.shape, value.stride(), strict=True)
        if size
    )
    storage = torch.zeros(reach, dtype=value.dtype, device=value.device)
    if value.dtype is torch.bool:
        storage.fill_(True)
    elif value.is_floating_point() or value.is_complex():
        storage = torch.rand(reach, dtype=value.dtype, device=value.device)
    return storage.as_strided(value.shape, value.stride()).detach()


def _reads_of(node: Node) -> Iterator[Read]:
    for user in node.users:
        if is_view(user):
            yield from _reads_of(user)
        else:
            yield node, user


def _grouped_rows(value: Node, reader: Node) -> int:
    """The number of rows that a grouped product divides at the offsets `value`; 0 if it
    does not."""
    if not isinstance(reader.target, OpOverload) or argument_of(reader, "offs", None) is not value:
        return 0
    left, right = (argument.meta["val"].shape for argument in reader.args[:2])  # type: ignore[union-attr]
    return int(right[-1] if len(left) == 3 else left[0] if len(right) == 3 else right[0])


def _indexed_length(value: Node, reader: Node) -> int:
    """How long the dimension is that `reader` indexes by `value`; 0 if it does not, as far as is
    known."""
    packet = getattr(reader.target, "overloadpacket", None)
    if packet in _INDEXED:
        table, index, dim = _INDEXED[packet]
        shape = argument_of(reader, table, None).meta["val"].shape
        if argument_of(reader, index, None) is value:
            at = dim if isinstance(dim, int) else argument_of(reader, dim, 0)
            return int(shape[min(at, len(shape) - 1)])
    elif packet in _COUNTED:
        index, count = _COUNTED[packet]
        return (
            max(int(argument_of(reader, count, 0)), 0)
            if argument_of(reader, index, None) is value
            else 0
        )
    elif packet in _BY_POSITION:
        indices = argument_of(reader, "indices", ())
        has_no_mask = all(
            index is None or index.meta["val"].dtype is not torch.bool for index in indices
        )
        if value in indices and has_no_mask:
            return int(reader.args[0].meta["val"].shape[indices.index(value)])  # type: ignore[union-attr]
    return 0
