"""How the two halves of a pair run: as one graph, one after the other, or side by side on two CUDA streams.

FX graphs are merged into one, in which collectives and messages of each half hide behind the other
(`zbcompile.passes.stage.overlap`). Graphs that a backend has compiled can no longer be interleaved: the halves run in
turn or, with ZBCOMPILE_PAIR_STREAMS=1, on two streams, so that the backward need not wait for the forward. That pays
if the kernels of one half leave the device partly idle, and costs memory, because the allocator keeps the memory of
the two streams apart. Recorded CUDA graphs share memory and always run in turn.

All of these take one list: the forward's inputs, a function that takes its results, and one that returns the
backward's inputs. They return the backward's results.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zbcompile.backends.cuda_graphs import Recorded
from zbcompile.backends.types import Run
from zbcompile.compiler.compile_model import make_manager
from zbcompile.env import PAIR_STREAMS
from zbcompile.passes.pass_list.passes_in_order import OVERLAP
from zbcompile.passes.torch_private import boxed
from zbcompile.runtime.stage_plan import CompiledStage
from zbcompile.schedules.ir.actions import Action, Pair

Kind = tuple[int, str, int]  # the stage of the forward, the operation of the backward and its stage


def make_pairs(
    steps: Sequence[Sequence[Action]], stage_of: Callable[[Action], CompiledStage]
) -> dict[tuple[Action, Action], Run]:
    """A function per pair in the order of a rank, the same one for pairs of the same stages. A rank with two model
    copies has at most four, unless its microbatches run different graphs."""
    pairs = [step for step in steps if isinstance(step, Pair)]
    if not pairs:
        return {}
    device = stage_of(pairs[0].forward).device
    aside = torch.get_device_module(device).Stream(device) if PAIR_STREAMS.read() else None
    made: dict[tuple[int, str, int], Run] = {}
    for pair in pairs:
        one, op, other = stage_of(pair.forward), pair.backward.op, stage_of(pair.backward)
        if (id(one), op, id(other)) not in made:
            made[id(one), op, id(other)] = _pair_of(one, op, other, aside)
    return {(f, b): made[id(stage_of(f)), b.op, id(stage_of(b))] for f, b in pairs}


def kinds_of_pairs(steps: Iterable[object]) -> dict[Kind, None]:
    """The kinds of pair among the steps of a rank, in order of appearance."""
    pairs = [step for step in steps if isinstance(step, Pair)]
    return dict.fromkeys((pair.forward.stage, pair.backward.op, pair.backward.stage) for pair in pairs)


def _pair_of(one: CompiledStage, op: str, other: CompiledStage, aside: Any) -> Run:
    if one.mergeable and other.mergeable:
        merged = make_manager().run(OVERLAP, (one.program.pieces["F"], other.program.pieces[op]))
        return boxed(merged.module).forward  # type: ignore[no-any-return]
    forward, backward = one.calls["F"].run, other.calls[op].run
    if aside is None or isinstance(forward, Recorded) or isinstance(backward, Recorded):
        return in_turn(forward, backward)
    return on_two_streams(forward, backward, one.device, aside)


def in_turn(forward: Run, backward: Run) -> Run:
    """The backward after the forward."""

    def run(values: list[Any]) -> Sequence[torch.Tensor]:
        *inputs, take, give = values
        values.clear()
        take(list(forward(inputs)))
        return backward(give())

    return run


def on_two_streams(forward: Run, backward: Run, device: torch.device, aside: Any) -> Run:
    """The forward on the stream `aside`, the backward on the current one, which continues when both are done.

    Memory made on one stream may be freed while the other one still reads it. Of the forward's inputs the allocator is
    told. What the forward makes is freed later, by passes on the current stream; `aside` makes nothing new before it
    has waited for those, at the beginning of the next pair.
    """
    module = torch.get_device_module(device)

    def run(values: list[Any]) -> Sequence[torch.Tensor]:
        *inputs, take, give = values
        values.clear()
        current = module.current_stream(device)
        aside.wait_stream(current)
        for tensor in inputs:
            if tensor.is_cuda:
                tensor.record_stream(aside)
        with module.stream(aside):
            take(list(forward(inputs)))
        results = backward(give())
        current.wait_stream(aside)
        return results

    return run
