"""How far predicted passes, and predicted steps of two processes, are from measured ones on this machine.

    torchrun --nproc-per-node 2 -m zbcompile.calibrate --output machine.toml
    python examples/benchmarks/predicted_passes.py machine.toml
    python examples/benchmarks/predicted_passes.py machine.toml resnet --operations
    python examples/benchmarks/predicted_passes.py machine.toml --beside without-products.toml
    python examples/benchmarks/predicted_passes.py machine.toml --step

F, B, W and BW of two stages of a GPT, a Llama, a Mixtral and a ResNet, in float32 on one thread. All passes take turns,
and the fastest run of each counts, by the CPU time of the thread: on a loaded machine too that is the pass itself. With
`--operations` the time of each kind of operation is shown instead, over all passes, timed inside of the graphs. What
other files, `--beside`, predict is compared with the same measured times.

With `--step` two processes train the same models over gloo. A step is measured from its first start on either rank to
its last end, by the clock on the wall: only on a machine that does nothing else is that the step itself. The fastest
and the median of some steps stand next to the simulation of the compiled schedule with predicted passes, and with the
connection that calibrating under torchrun has measured. The last columns are the work of the busiest rank, predicted
and as the CPU time of its thread, which a loaded machine disturbs less.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

import zbcompile
from zbcompile.compiler.compile_example import compile_example
from zbcompile.compiler.measure_nodes import values_like
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.machine.flops import count_flops
from zbcompile.passes.machine.roofline import node_seconds, seconds_of
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.torch_private import FakeTensorMode, boxed
from zbcompile.prediction.calibration import LARGEST
from zbcompile.prediction.predict import predicted_costs
from zbcompile.schedules import build, simulate

SCHEDULES = ("1f1b", "zb-h1")  # of --step
MICROBATCHES = 8
TEXT: dict[str, Any] = {"vocab_size": 2048, "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8}


def gpt() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=2048, n_embd=256, n_layer=2, n_head=8)), _text()


def llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT, intermediate_size=688, num_key_value_heads=4)), _text()


def mixtral() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = TEXT | {"intermediate_size": 512, "num_key_value_heads": 4, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes)), _text()


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes: dict[str, Any] = {"embedding_size": 32, "hidden_sizes": [64, 128], "depths": [2, 2], "layer_type": "basic"}
    inputs = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.zeros(8, dtype=torch.int64)}
    return ResNetForImageClassification(ResNetConfig(**sizes)), inputs


def _text() -> dict[str, Any]:
    tokens = torch.randint(2048, (4, 128))
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hardware", metavar="FILE.toml")
    parser.add_argument("names", nargs="*", default=["gpt", "llama", "mixtral", "resnet"])
    parser.add_argument("--operations", action="store_true", help="the operations that differ most")
    parser.add_argument("--beside", nargs="+", default=[], metavar="FILE.toml", help="how far other files are off")
    parser.add_argument("--step", action="store_true", help="steps of two processes instead of passes")
    parser.add_argument("--rounds", type=int, default=20, help="of all passes, or steps (default: %(default)s)")
    chosen = parser.parse_args()
    if chosen.step and "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        sys.exit(subprocess.run([sys.executable, *launch, __file__, *sys.argv[1:]], check=False).returncode)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.empty(LARGEST, dtype=torch.uint8)  # as calibrate does: glibc keeps freed memory from now on
    hardware = zbcompile.Hardware.find(chosen.hardware)
    if chosen.step:
        _steps(chosen.names, hardware, chosen.rounds)
    elif chosen.operations:
        for name in chosen.names:
            _show_operations(name, list(_pieces(name).values()), hardware)
    else:
        found = {(name, *key): piece for name in chosen.names for key, piece in _pieces(name).items()}
        _passes(found, hardware, chosen.rounds, chosen.beside)


def _pieces(name: str) -> dict[tuple[int, str], Piece]:
    """By stage and pass."""
    model, inputs = globals()[name]()
    program = compile_example(zbcompile.Example(model, (), inputs), build("zb-h1", 2, 4), Choices()).program
    return {(stage.stage, op): piece for stage in program.stages for op, piece in stage.pieces.items()}


def _passes(
    pieces: dict[tuple[str, int, str], Piece], hardware: zbcompile.Hardware, rounds: int, beside: Sequence[str]
) -> None:
    runs = {key: (boxed(piece.module), _values(piece)) for key, piece in pieces.items()}
    measured = dict.fromkeys(runs, math.inf)
    with torch.no_grad():
        for _ in range(rounds):
            for key, (run, values) in runs.items():
                began = time.thread_time()
                run(list(values))
                measured[key] = min(measured[key], time.thread_time() - began)
    pairs = {key: (seconds_of(piece.module, hardware), measured[key]) for key, piece in pieces.items()}
    _show(("model", "stage", "pass", "predicted ms", "measured ms", "off by"), pairs)
    for file in beside:
        other = zbcompile.Hardware.find(file)
        errors = sorted(abs(seconds_of(piece.module, other) / measured[key] - 1) for key, piece in pieces.items())
        print(f"{file}: median {median(errors):.1%}, largest {errors[-1]:.1%}")


def _values(piece: Piece) -> list[Any]:
    return [values_like(node) for node in piece.module.graph.find_nodes(op="placeholder")]


def _show(head: Sequence[str], pairs: Mapping[Any, tuple[float, ...]]) -> None:
    """Seconds by what they are of: predicted, measured, others. The error is between the first two."""
    errors = {key: times[0] / times[1] - 1 for key, times in pairs.items()}
    rows = [
        (*key, *(f"{1e3 * t:.2f}" for t in times[:2]), f"{errors[key]:+.1%}", *(f"{1e3 * t:.2f}" for t in times[2:]))
        for key, times in pairs.items()
    ]
    print(tabulate(rows, head, disable_numparse=True))
    sizes = sorted(map(abs, errors.values()))
    print(f"median {median(sizes):.1%}, largest {sizes[-1]:.1%}", flush=True)


def _steps(names: Sequence[str], hardware: zbcompile.Hardware, rounds: int) -> None:
    dist.init_process_group("gloo")
    pairs = {(name, schedule): _step(name, schedule, hardware, rounds) for name in names for schedule in SCHEDULES}
    if dist.get_rank() == 0:
        _show(("model", "schedule", "predicted ms", "fastest ms", "off by", "median", "work", "CPU"), pairs)
    dist.destroy_process_group()


def _step(name: str, schedule: str, hardware: zbcompile.Hardware, rounds: int) -> tuple[float, ...]:
    """A step's seconds: predicted, the fastest measured, the median; the busiest rank's: predicted, of its thread."""
    model, inputs = globals()[name]()
    batch = {key: value.repeat(MICROBATCHES, *[1] * (value.ndim - 1)) for key, value in inputs.items()}
    pipe = zbcompile.pipeline(model, schedule=schedule, microbatches=MICROBATCHES, hardware=hardware)
    pipe.step(**batch)
    found = []
    for _ in range(rounds):
        dist.barrier()
        began, idle = time.monotonic(), time.thread_time()
        pipe.step(**batch)
        cpu = time.thread_time() - idle
        span = torch.tensor([-began, time.monotonic(), cpu], dtype=torch.float64)  # one clock for both processes
        dist.all_reduce(span, dist.ReduceOp.MAX)
        found.append((float(span[:2].sum()), float(span[2])))
    predicted = simulate(pipe.program.lowered, predicted_costs(pipe.program))
    walls, threads = zip(*found, strict=True)
    return predicted.makespan, min(walls), median(walls), predicted.work, min(threads)


class _Timed(torch.fx.Interpreter):
    """Runs a graph, and takes the least time of every operation."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece.module)
        self.seconds: dict[torch.fx.Node, float] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        began = time.thread_time()
        value = target(*args, **kwargs)
        self.seconds[self.node] = min(time.thread_time() - began, self.seconds.get(self.node, math.inf))
        return value


def _operations(piece: Piece, hardware: zbcompile.Hardware) -> Iterator[tuple[str, float, float]]:
    """The name of every operation, its predicted and its measured seconds."""
    timed, flops = _Timed(piece), count_flops(piece.module, FakeTensorMode(allow_non_fake_inputs=True))
    with torch.no_grad():
        for _ in range(15):
            timed.run(*_values(piece))
    for node, seconds in timed.seconds.items():
        yield str(node.target), node_seconds(node, flops[node], hardware), seconds


def _show_operations(name: str, pieces: list[Piece], hardware: zbcompile.Hardware) -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for operation, *pair in (each for piece in pieces for each in _operations(piece, hardware)):
        found.setdefault(operation, []).append((1e3 * pair[0], 1e3 * pair[1]))
    sums = [(o, len(f), *(sum(column) for column in zip(*f, strict=True))) for o, f in found.items()]
    sums.sort(key=lambda row: -abs(row[2] - row[3]))
    print(tabulate(sums[:20], (name, "times", "predicted ms", "measured ms"), floatfmt=".2f"))


if __name__ == "__main__":
    main()
