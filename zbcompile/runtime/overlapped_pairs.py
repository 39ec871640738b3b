"""How the two halves of a pair run: as one graph, one after the other, or side by side on two CUDA streams.

FX graphs are merged into one, in which collectives and messages of each half hide behind the other
(`zbcompile.passes.stage.overlap`). Graphs that a backend has compiled can no longer be interleaved: the halves run in
turn or, with ZBCOMPILE_PAIR_STREAMS=1, on two streams, so that the second need not wait for the first. That pays
if the kernels of one half leave the device partly idle, and costs memory, because the allocator keeps the memory of
the two streams apart. Recorded CUDA graphs and placed runs share memory and always run in turn.

Merging is a pass like others and goes through the compiler's `PassManager`, but its results are kept with the plan of a
step, not in the program:

* whom a pair joins is known only with the step: its microbatches may run graphs of several programs, and a step of
  another number of microbatches has other pairs;
* whether a pair is one graph depends on what this process made of the graphs: a backend, a place in memory, a look for
  a NaN or for draws replaces what runs, and then nothing is merged;
* a merged graph repeats its halves, so a saved program would hold a half once more for every pair that it is in.

However it runs, a pair takes one list: the first half's inputs, a function that takes its results, and one that
returns the second half's inputs. It returns the second half's results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zbcompile.backends.cuda_graphs import Recorded
from zbcompile.backends.placed import PlacedRun
from zbcompile.backends.types import Run
from zbcompile.compiler.compile_stage import make_manager
from zbcompile.env import PAIR_STREAMS
from zbcompile.passes import gpu
from zbcompile.passes.pass_list.passes_in_order import OVERLAP
from zbcompile.passes.torch_private import boxed
from zbcompile.runtime.stage_plan import CompiledStage
from zbcompile.schedules.ir.actions import Action, Pair

Half = tuple[str, CompiledStage]


def make_pairs(
    steps: Sequence[Sequence[Action]], stage_of: Callable[[Action], CompiledStage]
) -> dict[tuple[Action, Action], Run]:
    """A function per pair in the order of a rank, the same one for pairs of the same stages. A rank with two model
    copies has at most four, unless its microbatches run different graphs."""
    pairs = [step for step in steps if isinstance(step, Pair)]
    if not pairs:
        return {}
    device = stage_of(pairs[0].first).device
    aside = gpu.new_stream(device) if PAIR_STREAMS.read() else None
    made: dict[tuple[Action, Action], Run] = {}
    kinds: dict[tuple[str, int, str, int], Run] = {}
    for first, second in pairs:
        one, other = (first.op, stage_of(first)), (second.op, stage_of(second))
        kind = one[0], id(one[1]), other[0], id(other[1])
        if kind not in kinds:
            kinds[kind] = _pair_of(one, other, aside)
        made[first, second] = kinds[kind]
    return made


def _pair_of(one: Half, other: Half, aside: Any) -> Run:
    (op, stage), (other_op, other_stage) = one, other
    if stage.mergeable and other_stage.mergeable:
        merged = make_manager().run(OVERLAP, (stage.program.pieces[op], other_stage.program.pieces[other_op]))
        return boxed(merged.module).forward  # type: ignore[no-any-return]
    first, second = stage.calls[op].run, other_stage.calls[other_op].run
    if aside is None or isinstance(first, Recorded | PlacedRun) or isinstance(second, Recorded | PlacedRun):
        return in_turn(first, second)
    return on_two_streams(first, second, stage.device, aside)


def in_turn(first: Run, second: Run) -> Run:
    """The second half after the first."""

    def run(values: list[Any]) -> Sequence[torch.Tensor]:
        *inputs, take, give = values
        values.clear()
        take(list(first(inputs)))
        return second(give())

    return run


def on_two_streams(first: Run, second: Run, device: torch.device, aside: Any) -> Run:
    """The first half on the stream `aside`, the second on the current one, which continues when both are done.

    Memory made on one stream may be freed while the other one still reads it. Of the first half's inputs the allocator
    is told. What the first half makes is freed later, by passes on the current stream; `aside` makes nothing new before
    it has waited for those, at the beginning of the next pair.
    """

    def run(values: list[Any]) -> Sequence[torch.Tensor]:
        *inputs, take, give = values
        values.clear()
        current = gpu.current_stream(device)
        aside.wait_stream(current)
        for tensor in inputs:
            if gpu.is_gpu(tensor.device):
                tensor.record_stream(aside)
        with gpu.on_stream(aside):
            take(list(first(inputs)))
        results = second(give())
        current.wait_stream(aside)
        return results

    return run
