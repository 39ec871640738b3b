"""What `zbcompile.monitor` costs: CPU seconds of a step without it, of steps not shown, of steps shown.

    torchrun --standalone --nproc-per-node 2 examples/benchmarks/monitor_cost.py

Two layers of width 64 per rank, 8 microbatches: short passes, so that the host's work counts most. Steps
without it run before and after the others. One process, and the median, because a shared machine drifts.
"""

import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import zbcompile

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, next_byte_loss

ROUNDS, EVERY = 60, 4


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = GPT(layers=2 * dist.get_world_size(), width=64, heads=2, length=32)
    inputs, targets = torch.randint(256, (2, 16, 32)).unbind()
    pipe = zbcompile.pipeline(model, schedule="zb-h1", microbatches=8, loss=next_byte_loss)
    found: dict[str, list[float]] = {"first": [], "without": [], "not shown": [], "shown": []}

    def timed(kind: str) -> None:
        dist.barrier()
        begin = time.process_time()
        pipe.step(inputs, target=targets)
        found[kind].append(time.process_time() - begin)

    def timed_steps(kind: str, shown: str) -> None:
        for number in range(EVERY):
            timed(kind if number < EVERY - 1 else shown)

    timed("first")
    for _ in range(ROUNDS // 2):
        timed_steps("without", "without")
    with zbcompile.monitor(pipe, EVERY, callback=str):
        timed("first")  # starts the clock
        pipe.step_index = 0
        timed_steps("first", "first")  # compares clocks, and predicts the step
        for _ in range(ROUNDS):
            timed_steps("not shown", "shown")
    for _ in range(ROUNDS // 2):
        timed_steps("without", "without")
    if dist.get_rank() == 0:
        base = median(found["without"])
        for kind, seconds in list(found.items())[1:]:
            print(f"{kind:10} {median(seconds) * 1e3:7.2f} ms  {median(seconds) / base - 1:+.1%}")
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
