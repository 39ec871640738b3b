"""Measures the cost of splitting a backward: one step of one stage, relative to eager's forward and
backward.

    python examples/benchmarks/split_tax.py
    python examples/benchmarks/split_tax.py --device cuda --dtype bfloat16 --width 4096 --length 2048 --inductor

One process, one thread. All contestants take turns in rounds, and the median of the rounds' ratios
counts, because a shared machine drifts. Contestants: F + B + W and F + BW of the compiled stage,
weight gradients added inside the GEMM; torch's own split (stage_backward_input, then
stage_backward_weight, of torch.distributed.pipelining); with --inductor also F + B + W compiled by
backend="inductor", and the unsplit stage compiled by torch.compile. torch does not split a first
stage: its whole backward is W. Time is of the CPU; on a GPU it is wall time until the device has
done the work, F + B + W also run as CUDA graphs, and a second table has the most memory that each
contestant takes.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from tqdm import tqdm

from zbcompile.backends.backend import Backend, make_backend
from zbcompile.backends.cuda_graphs import record
from zbcompile.backends.types import Run
from zbcompile.engine.gradients import Gradients
from zbcompile.engine.stage import CompiledStage, StageRun, prepare_stage
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.graph.roles import Slot

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.stages import Stage, compile_stages
from devices import add_device, device_of_rank, seconds_of

Step = Callable[[], None]
DTYPES = "float32", "bfloat16", "float16"
OURS, FUSED, TORCH = "F + B + W", "F + BW", "torch's split"
INDUCTOR, COMPILED, GRAPHS = (
    "inductor F + B + W",
    "torch.compile, unsplit",
    "F + B + W, CUDA graphs",
)


def eager_step(stage: Stage) -> None:
    """Forward and full backward."""
    arrived = [] if stage.input is None else [stage.input.detach().requires_grad_()]
    stage.eager(*arrived).backward(stage.gradient)


def torch_step(stage: Stage) -> None:
    """Forward, backward of the input, backward of the weights, as torch's split schedules call
    them."""
    if stage.input is None:
        eager_step(stage)
        return
    arrived = stage.input.detach().requires_grad_()
    output = stage.eager(arrived)
    gradients = None if stage.gradient is None else [stage.gradient]
    _, groups = stage_backward_input(
        [output], gradients, [arrived], iter(stage.parameters.values())
    )
    stage_backward_weight(iter(stage.parameters.values()), groups)


def compiled_step(stage: Stage, prepared: CompiledStage, split: bool) -> Step:
    """F, then B and W or both in one, as the runtime calls them."""
    weight = next(iter(stage.parameters.values()))
    run = StageRun(
        stages=[prepared],
        gradients=Gradients(stage.parameters, frozenset(), CompileOptions()),
        inputs=[dict(stage.inputs)],
        loss_factor=torch.ones((), device=prepared.device, dtype=weight.dtype),
        seeds=[0],
    )
    input_, gradient = stage.input, stage.gradient

    @torch.no_grad()
    def step() -> None:
        run.run("F", 0, [] if input_ is None else [input_])
        back = [] if gradient is None else [gradient]
        if split:
            run.run("B", 0, back)
            run.run("W", 0, [])
        else:
            run.run("BW", 0, back)

    return step


def prepare(
    stage: Stage, device: torch.device, runs: Mapping[str, Run] | None = None
) -> CompiledStage:
    """The stage bound to its parameters; `runs` are its passes if they do not run as FX graphs."""
    resident = {Slot("parameter", name): parameter for name, parameter in stage.parameters.items()}
    return prepare_stage(stage.program, resident, device, -1, runs)


def recorded(stage: Stage, device: torch.device, backend: str) -> Mapping[str, Run]:
    """The passes of a stage as CUDA graphs."""
    pieces, pool = stage.program.pieces, torch.cuda.graph_pool_handle()
    runs, _ = make_backend(backend, device).compile(pieces)
    return {name: record(name, run, pieces[name], pool) for name, run in runs.items()}


def contestants(stage: Stage, device: torch.device, inductor: Backend | None) -> dict[str, Step]:
    prepared = prepare(stage, device)
    steps = {
        OURS: compiled_step(stage, prepared, split=True),
        FUSED: compiled_step(stage, prepared, split=False),
        TORCH: lambda: torch_step(stage),
    }
    if device.type == "cuda":
        graphs = recorded(stage, device, "inductor" if inductor else "fx")
        steps[GRAPHS] = compiled_step(stage, prepare(stage, device, graphs), split=True)
    if inductor:
        runs, _ = inductor.compile(stage.program.pieces)
        steps[INDUCTOR] = compiled_step(stage, prepare(stage, device, runs), split=True)
        unsplit = replace(stage, eager=torch.compile(stage.eager, dynamic=False))
        steps[COMPILED] = partial(eager_step, unsplit)
    return steps


def measure(
    stage: Stage, device: torch.device, steps: dict[str, Step], rounds: int
) -> dict[str, float]:
    """The median over all rounds of each contestant's seconds, divided by eager's in the same
    round."""
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for parameter in stage.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    for round_ in range(rounds + 2):
        eager = seconds_of(partial(eager_step, stage), device)
        for name, step in _rotated(steps, round_):
            seconds = seconds_of(step, device)
            if round_ > 1:  # the first rounds warm up
                ratios[name].append(seconds / eager)
    return {name: median(values) for name, values in ratios.items()}


def _rotated(steps: dict[str, Step], round_: int) -> Iterator[tuple[str, Step]]:
    """Every contestant follows eager equally often."""
    names = list(steps)
    for i in range(len(names)):
        name = names[(i + round_) % len(names)]
        yield name, steps[name]


def most_memory(step: Step, device: torch.device) -> float:
    """The most MiB of the GPU that a step takes beyond what is held before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="gpt,llama", help="gpt, llama or both (default: %(default)s)"
    )
    parser.add_argument("--width", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument(
        "--length", type=int, default=128, help="tokens of a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=4, help="sequences of a microbatch (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=21, help="paired rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--inductor",
        action="store_true",
        help="also compiled by inductor (minutes, the first time)",
    )
    parser.add_argument(
        "--dtype", default="float32", choices=DTYPES, help="of the model (default: %(default)s)"
    )
    add_device(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device, dtype = device_of_rank(options.device), getattr(torch, options.dtype)
    inductor = make_backend("inductor", device) if options.inductor else None
    rows, memory = [], []
    for kind in options.models.split(","):
        stages = compile_stages(
            kind, options.width, options.length, options.batch, None, device, dtype
        )
        for stage in tqdm(stages, unit="stage"):
            steps, name = contestants(stage, device, inductor), {"model": kind, "stage": stage.name}
            rows.append({**name, **measure(stage, device, steps, options.rounds)})
            if device.type == "cuda":
                steps = {"eager": partial(eager_step, stage), **steps}
                memory.append(
                    {**name, **{step: most_memory(run, device) for step, run in steps.items()}}
                )
    print(
        f"seconds / eager forward and backward, {device.type}, median of {options.rounds} paired"
        " rounds"
    )
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    if memory:
        print("most memory beyond parameters, gradients and inputs, MiB")
        print(tabulate(memory, headers="keys", floatfmt=".1f"))


if __name__ == "__main__":
    main()
