"""How the two halves of a pair run together: as one graph, or side by side on two CUDA streams.

FX graphs are merged into one, in which collectives and messages of each half hide behind the other
(`zbcompile.passes.stage.overlap`). Graphs that a backend has compiled can no longer be interleaved: such halves run one
after the other, as any two passes, or, with ZBCOMPILE_PAIR_STREAMS=1, on two streams, so that the second need not wait
for the first. That pays if the kernels of one half leave the device partly idle, and costs memory, because the
allocator keeps the memory of the two streams apart. Recorded CUDA graphs and placed runs share memory and never run
side by side.

Merging is a pass like others and goes through the compiler's `PassManager`. Its results are kept with the stages of a
program as they are bound to a process (`CompiledStage.pairs`), not in the program of all ranks, which was tried:

* whom a pair joins is known only with the step. If microbatches of two shapes alternate, all 16 pairs of 1f1b-overlap
  (4 ranks, 8 microbatches) join graphs of two programs; no program has them, and they would hide nothing;
* whether a pair is one graph depends on what this process made of the graphs: a backend, a place in memory, a look for
  a NaN replaces what runs, and then nothing is merged;
* a merged graph repeats its halves: the directory of a GPT with 16 blocks would hold 60 % more operations, to save 7 ms
  for each kind of pair.

Either way, what runs takes one list: the first half's inputs, a function that takes its results, and one that returns
the second half's inputs. It returns the second half's results.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from zbcompile.backends.cuda_graphs import RecordedPass
from zbcompile.backends.placed import PlacedRun
from zbcompile.backends.types import Run
from zbcompile.compiler.compile_stage import make_manager
from zbcompile.env import PAIR_STREAMS
from zbcompile.passes import gpu
from zbcompile.passes.pass_list.passes_in_order import OVERLAP
from zbcompile.passes.torch_private import boxed
from zbcompile.runtime.stage_plan import CompiledStage
from zbcompile.schedules.ir.actions import Action, Pair


def run_together(
    steps: Sequence[Sequence[Action]], stage_of: Callable[[Action], CompiledStage]
) -> dict[Sequence[Action], Run]:
    """The graphs that run the pairs in the order of a rank; pairs whose halves run one after the other are left out."""
    pairs = [step for step in steps if isinstance(step, Pair)]
    found = {pair: _run_of(pair, stage_of(pair.first), stage_of(pair.second)) for pair in pairs}
    return {pair: run for pair, run in found.items() if run is not None}


def _run_of(pair: Pair, one: CompiledStage, other: CompiledStage) -> Run | None:
    """The same for all pairs of these passes; a rank with two model copies has at most four, unless its microbatches
    run different graphs."""
    known, kind = one.pairs.setdefault(other, {}), (pair.first.op, pair.second.op)
    if kind not in known:
        known[kind] = _make_run(*kind, one, other)
    return known[kind]


def _make_run(op: str, other_op: str, one: CompiledStage, other: CompiledStage) -> Run | None:
    if one.mergeable and other.mergeable:
        merged = make_manager().run(OVERLAP, (one.program.pieces[op], other.program.pieces[other_op]))
        return boxed(merged.module).forward  # type: ignore[no-any-return]
    first, second = one.calls[op].run, other.calls[other_op].run
    shared = isinstance(first, RecordedPass | PlacedRun) or isinstance(second, RecordedPass | PlacedRun)
    return None if shared or not PAIR_STREAMS.read() else on_two_streams(first, second, one.device, _aside(one.device))


@cache
def _aside(device: torch.device) -> Any:
    """The stream of the first halves."""
    return gpu.new_stream(device)


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
