"""backend="inductor": a step next to our fx backend and alongside torch's compiled 1F1B; and what
compiling costs.

    torchrun --standalone --nproc-per-node 2 examples/benchmarks/inductor.py
    python examples/benchmarks/inductor.py --start [--layers 24 --ranks 8 --width 64]

The first takes steps of the same training as vs_torch.py in interleaved rounds, one thread per
rank, and prints medians over the rounds of seconds per step, of each contender's seconds relative
to the fx backend under the same schedule, and relative to torch's Schedule1F1B over modules
compiled by torch.compile, which torch's zero-bubble schedules refuse.

The second compiles a GPT into as many stages as ranks (zb-h1) with an empty cache, then starts the
first, a middle and the last rank in fresh processes from the saved program: seconds from the
directory until graphs can be called, imports not counted.
"""

import argparse
import copy
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from tabulate import tabulate

import zbcompile
from zbcompile.backends.backend import compile_passes, make_backend
from zbcompile.program.directory import read_manifest, read_program

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.vs_torch import LAYERS, Contender, case, ours, torchs
from devices import add_device, device_of_rank, start_group
from gpt import GPT, next_byte_loss

SCHEDULES = ("zb-h1", "zb-v", "dualpipe-v")
TORCH = "torch Schedule1F1B, compiled"
CPU = torch.device("cpu")


def contenders(layers: int, device: torch.device) -> dict[str, Contender]:
    model, inputs, targets = case(layers, device)
    contenders_ = {
        f"{name} {backend}": ours(name, copy.deepcopy(model), inputs, targets, backend)
        for name in SCHEDULES
        for backend in ("fx", "inductor")
    }
    return contenders_ | {
        TORCH: torchs("Schedule1F1B", copy.deepcopy(model), inputs, targets, compiled=True)
    }


def compare(layers: int, rounds: int, device: torch.device) -> None:
    """The step times of all contenders."""
    start_group(device)
    contenders_ = contenders(layers, device)
    for _ in range(rounds + 2):  # the first rounds warm up
        for contender in contenders_.values():
            contender.measure()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {layers} layers, median of {rounds} rounds")
        head = ["", "s/step", "time / fx", "CPU / fx", f"time / {TORCH}"]
        print(tabulate([row(name, contenders_) for name in contenders_], head, floatfmt=".3f"))
    dist.destroy_process_group()


def row(name: str, contenders_: dict[str, Contender]) -> list[str | float | None]:
    one = contenders_[name]
    plain = contenders_.get(name.replace("inductor", "fx"), one)
    return [
        name,
        median(one.seconds[2:]),
        ratio(one.seconds, plain.seconds),
        ratio(one.cpu, plain.cpu),
        ratio(one.seconds, contenders_[TORCH].seconds),
    ]


def ratio(one: list[float], second: list[float]) -> float:
    """The median over the rounds."""
    return median(a / b for a, b in zip(one[2:], second[2:], strict=True))


def start(layers: int, ranks: int, width: int) -> None:
    """Measures compiling, and the second start of a rank."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache"
        tokens = torch.randint(256, (2, 2 * ranks, 33)).unbind()[0]
        model = GPT(layers=layers, width=width, heads=4, length=32)
        pipe = zbcompile.pipeline(
            model,
            schedule="zb-h1",
            ranks=ranks,
            microbatches=2 * ranks,
            loss=next_byte_loss,
            balance=[f"blocks.{i * layers // ranks}" for i in range(1, ranks)],  # equal stages
        )
        seconds = timed(
            lambda: pipe.compile(tokens[:, :-1].contiguous(), target=tokens[:, 1:].contiguous())
        )
        print(f"{layers} layers in {ranks} stages: from the model to its program {seconds:.1f} s")
        pipe.program.save(f"{folder}/program")
        begin = time.perf_counter()
        done = compile_passes(pipe.program, range(ranks), make_backend("inductor", CPU))[1]
        print(
            f"empty cache: {time.perf_counter() - begin:.1f} s in one process; {done}", flush=True
        )
        for rank in (0, ranks // 2, ranks - 1):
            command = [sys.executable, __file__, "--rank", str(rank), "--ranks", str(ranks)]
            subprocess.run([*command, "--program", f"{folder}/program"], check=True)


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def start_rank(folder: Path, rank: int) -> None:
    """One rank's start from a program directory, imports not counted."""
    for name in (
        "_inductor.codecache",
        "_inductor.output_code",
        "_inductor.async_compile",
        "utils.cpp_extension",
    ):
        importlib.import_module(f"torch.{name}")
    begin, cpu = time.perf_counter(), time.process_time()
    program = read_program(folder, read_manifest(folder), (rank,), CPU)
    done = compile_passes(program, (rank,), make_backend("inductor", CPU))[1]
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    print(
        f"rank {rank}: second start {seconds:.2f} s ({cpu_seconds:.2f} s of CPU); {done}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="paired rounds (default: %(default)s)"
    )
    parser.add_argument("--start", action="store_true", help="measure compiling instead of steps")
    parser.add_argument("--layers", type=int, help=f"(default: {LAYERS} for steps, 24 for --start)")
    parser.add_argument("--ranks", type=int, default=8, help="of --start (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of --start (default: %(default)s)")
    parser.add_argument("--rank", type=int, help="internal: start this rank")
    parser.add_argument("--program", type=Path, help="internal: of this program")
    add_device(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank is not None:
        start_rank(options.program, options.rank)
    elif options.start:
        start(options.layers or 24, options.ranks, options.width)
    else:
        compare(options.layers or LAYERS, options.rounds, device_of_rank(options.device))


if __name__ == "__main__":
    main()
