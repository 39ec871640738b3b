"""Measured costs: each kind of operation of a graph is run, forward and backward, on synthetic data.

Equal operations on tensors of equal form are measured once: the layers of a transformer cost no more than one of them.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import attrgetter
from statistics import mean
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from zbcompile.compiler.synthetic_values import synthetic, values_like
from zbcompile.passes.graph.fx import is_getitem
from zbcompile.passes.graph.process_groups import is_collective
from zbcompile.passes.graph.storage import is_view, tensors_of
from zbcompile.passes.partition.liveness import Line
from zbcompile.passes.partition.node_costs import kernel_key

WARM_UP = 2
RUNS = (5, 25)  # at least, at most
ENOUGH = 0.02  # stop early after this many seconds once RUNS[0] is reached


def measure_line(line: Line) -> dict[str, float]:
    """Seconds of forward and backward of every distinct operation of `line`, by
    `zbcompile.passes.partition.node_costs.kernel_key`.

    Runs on the device of the graph. A part of a tuple and a view take no time, and a collective none of this process.
    """
    found: dict[str, float] = {}
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        for node in line.nodes:
            if not (is_getitem(node) or is_view(node) or is_collective(node)) and kernel_key(node) not in found:
                found[kernel_key(node)] = mean_run_seconds(_run_of(node))
    return found


def _run_of(node: Node) -> Callable[[], None]:
    """Forward and, if a gradient flows, backward of one operation."""
    inputs = {argument: _value_of(argument, node) for argument in node.all_input_nodes}
    leaves = [t for argument in inputs if argument.meta.get("differentiable") for t in tensors_of(inputs[argument])]
    leaves = [t.requires_grad_() for t in leaves if t.is_floating_point() or t.is_complex()]
    args, kwargs = map_arg((node.args, node.kwargs), inputs.__getitem__)  # type: ignore[misc]
    device = next((t.device for value in inputs.values() for t in tensors_of(value)), torch.device("cpu"))
    tangents = [synthetic(t) for t in tensors_of(node.meta["val"])]

    def run() -> None:
        with torch.enable_grad():
            results = tensors_of(node.target(*args, **kwargs))  # type: ignore[operator]
        pairs = [(r, t) for r, t in zip(results, tangents, strict=True) if r.requires_grad]
        if leaves and pairs:
            roots, gradients = zip(*pairs, strict=True)
            torch.autograd.grad(roots, leaves, gradients, allow_unused=True)
        if device.type != "cpu":
            torch.accelerator.synchronize()

    return run


def _value_of(node: Node, reader: Node) -> Any:
    """A value of the form that `node` has, for `reader`."""
    if node.op == "get_attr":
        return attrgetter(str(node.target))(node.graph.owning_module)
    return values_like(node, [(node, reader)])


def mean_run_seconds(run: Callable[[], None]) -> float:
    """Mean of the middle half of several runs: what interrupts one of them does not count."""
    return run_seconds_in_turn([run])[0]


def run_seconds_in_turn(runs: Sequence[Callable[[], None]]) -> list[float]:
    """Of each run, when all take turns, the mean of the middle half of its times."""
    clock = clock_of(torch.accelerator.is_available())
    for _ in range(WARM_UP):
        for run in runs:
            run()
    rounds: list[list[float]] = []
    while len(rounds) < RUNS[0] or (sum(map(sum, rounds)) < ENOUGH * len(runs) and len(rounds) < RUNS[1]):
        ends = [clock()]
        for run in runs:
            run()
            ends.append(clock())
        rounds.append([end - begin for begin, end in pairwise(ends)])
    quarter = len(rounds) // 4
    return [mean(sorted(times)[quarter : len(times) - quarter]) for times in zip(*rounds, strict=True)]


def clock_of(accelerated: bool) -> Callable[[], float]:
    """The clock for runs: if all is done by the one thread of a CPU, its own time, which nothing else on the
    machine prolongs."""
    return time.perf_counter if accelerated or torch.get_num_threads() > 1 else time.thread_time
