"""What splitting a backward costs: one step of one stage, relative to eager's forward and full backward.

    python examples/benchmarks/split_tax.py

One process, one thread. All contestants take turns in rounds, and the median of the rounds' ratios counts, because a
shared machine drifts. Contestants: F + B + W and F + BW of the compiled stage, weight gradients added inside the GEMM;
torch's own split (stage_backward_input, then stage_backward_weight, of torch.distributed.pipelining); with --inductor
also F + B + W compiled by backend="inductor". torch does not split a first stage: its whole backward is W.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from tqdm import tqdm

from zbcompile.backends.backend import Backend, make_backend
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.graph.roles import Slot
from zbcompile.runtime.gradient_buffers import Gradients
from zbcompile.runtime.stage_plan import CompiledStage, prepare_stage
from zbcompile.runtime.stage_run import StageRun

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.stages import Stage, compile_stages

Step = Callable[[], None]
OURS, FUSED, TORCH, INDUCTOR = "F + B + W", "F + BW", "torch's split", "inductor F + B + W"


def eager_step(stage: Stage) -> None:
    """Forward and full backward."""
    arrived = [] if stage.arrives is None else [stage.arrives.detach().requires_grad_()]
    stage.eager(*arrived).backward(stage.comes_back)


def torch_step(stage: Stage) -> None:
    """Forward, backward of the input, backward of the weights, as torch's split schedules call them."""
    if stage.arrives is None:
        eager_step(stage)
        return
    arrived = stage.arrives.detach().requires_grad_()
    output = stage.eager(arrived)
    given = None if stage.comes_back is None else [stage.comes_back]
    _, groups = stage_backward_input([output], given, [arrived], iter(stage.parameters.values()))
    stage_backward_weight(iter(stage.parameters.values()), groups)


def compiled_step(stage: Stage, prepared: CompiledStage, split: bool) -> Step:
    """F, then B and W or both in one, as the runtime calls them."""
    run = StageRun(
        stage=prepared,
        gradients=Gradients(stage.parameters, frozenset(), Choices()),
        inputs=[dict(stage.inputs)],
        loss_factor=torch.ones(()),
        seeds=[0],
    )
    arrives, comes_back = stage.arrives, stage.comes_back

    @torch.no_grad()
    def step() -> None:
        run.forward(0, [] if arrives is None else [arrives])
        back = [] if comes_back is None else [comes_back]
        if split:
            run.backward("B", 0, back)
            run.weight(0)
        else:
            run.backward("BW", 0, back)

    return step


def prepare(stage: Stage, backend: Backend | None = None) -> CompiledStage:
    """The stage bound to its parameters, its graphs run by `backend`."""
    resident = {Slot("parameter", name): parameter for name, parameter in stage.parameters.items()}
    runs = backend.compile(stage.program.pieces)[0] if backend else None
    return prepare_stage(stage.program, resident, torch.device("cpu"), -1, runs)


def contestants(stage: Stage, inductor: Backend | None) -> dict[str, Step]:
    prepared = prepare(stage)
    steps = {
        OURS: compiled_step(stage, prepared, split=True),
        FUSED: compiled_step(stage, prepared, split=False),
        TORCH: lambda: torch_step(stage),
    }
    if inductor:
        steps[INDUCTOR] = compiled_step(stage, prepare(stage, inductor), split=True)
    return steps


def measure(stage: Stage, steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """The median over all rounds of each contestant's CPU seconds, divided by eager's in the same round."""
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    for parameter in stage.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    for turn in range(rounds + 2):
        eager = seconds(lambda: eager_step(stage))
        for name, step in _rotated(steps, turn):
            taken = seconds(step)
            if turn > 1:  # the first rounds warm up
                ratios[name].append(taken / eager)
    return {name: median(found) for name, found in ratios.items()}


def _rotated(steps: dict[str, Step], turn: int) -> Iterator[tuple[str, Step]]:
    """Every contestant follows eager equally often."""
    names = list(steps)
    for i in range(len(names)):
        name = names[(i + turn) % len(names)]
        yield name, steps[name]


def seconds(step: Step) -> float:
    begin = time.process_time()
    step()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt,llama", help="gpt, llama or both (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a microbatch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=21, help="paired rounds (default: %(default)s)")
    parser.add_argument("--inductor", action="store_true", help="also compiled by inductor (minutes, the first time)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    inductor = make_backend("inductor", torch.device("cpu")) if options.inductor else None
    rows = []
    for kind in options.models.split(","):
        for stage in tqdm(compile_stages(kind, options.width, options.length, options.batch), unit="stage"):
            found = measure(stage, contestants(stage, inductor), options.rounds)
            rows.append({"model": kind, "stage": stage.name, **found})
    print(f"CPU seconds / eager forward and backward, median of {options.rounds} paired rounds")
    print(tabulate(rows, headers="keys", floatfmt=".3f"))


if __name__ == "__main__":
    main()
