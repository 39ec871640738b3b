"""How long a rank takes to start from a saved program: a 24-layer GPT in 8 stages, one per rank.

    python -m zbcompile.compile examples/benchmarks/program_load.py:gpt --schedule zb-h1 --ranks 8 --output program
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 8 examples/benchmarks/program_load.py program

Each rank reads and verifies its part, builds its graphs, allocates its parameters and plans its
step; imports and the start of the process group are not counted. CPU seconds, because 8 processes
share the cores; `slowest` is wall time.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import zbcompile
import zbcompile.persistence.loaded_pipeline

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, next_byte_loss


def gpt() -> zbcompile.Example:
    tokens = torch.randint(256, (2, 129))
    model = GPT(layers=24, width=256, heads=8, length=128)
    return zbcompile.Example(
        model, (tokens[:, :-1],), loss=next_byte_loss, target=tokens[:, 1:].contiguous()
    )


def bytes_of_rank(folder: Path, rank: int) -> int:
    """Returns the bytes of the files of a rank."""
    shared = sum((folder / name).stat().st_size for name in ("manifest.json", "schedule.json"))
    return shared + sum(path.stat().st_size for path in folder.glob(f"rank-{rank:04d}.*"))


def _nothing(name: str, tensor: torch.Tensor) -> None:
    """Leaves the memory unfilled, because filling it is no part of loading."""


def main() -> None:
    dist.init_process_group("gloo")
    torch.optim.SGD(
        [torch.zeros(1, requires_grad=True)]
    )  # torch imports much with the first optimizer
    dist.barrier()
    began, clock = time.process_time(), time.monotonic()
    zbcompile.load(sys.argv[1], init=_nothing)
    rank_bytes = (
        time.process_time() - began,
        time.monotonic() - clock,
        bytes_of_rank(Path(sys.argv[1]), dist.get_rank()),
    )
    every = [rank_bytes] * dist.get_world_size()
    dist.all_gather_object(every, rank_bytes)
    if dist.get_rank() == 0:
        seconds, clocks, sizes = zip(*every, strict=True)
        print(f"CPU seconds per rank: {min(seconds):.2f} to {max(seconds):.2f}")
        print(f"slowest by the clock: {max(clocks):.2f} s")
        print(f"bytes read per rank: {min(sizes):,} to {max(sizes):,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
