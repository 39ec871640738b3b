"""Measures the peak memory of training with AdamW and zero=1 on two replicas, in a checkout:

    torchrun --standalone --nproc-per-node 4 examples/benchmarks/zero1_memory.py

Bytes of parameters, gradients and optimizer state, as a multiple of the parameters P of a rank:
what the CPU allocator reports within a step and its update, on top of what exists before it; the
lowest peak of several steps.
Activations are small.
"""

import argparse
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import zbcompile

PREDICTED = {"1f1b": 3.5, "zb-v": 3.25}  # one stage per rank, and two
ACTIVATIONS = 0.05  # P that activations and messages may take
STEPS = 8  # the lowest peak counts: gloo frees the copy that it sends when its thread gets to it


def peak(schedule: str, width: int) -> float:
    """Returns the peak bytes of a step and its update, divided by those of the parameters."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    pipe = zbcompile.pipeline(
        model, schedule=schedule, microbatches=4, loss=nn.functional.mse_loss, mesh=mesh
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3, zero=1)
    batch = torch.randn(8, width)

    def step_peak() -> int:
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            pipe.step(batch, target=batch)
            optimizer.step()
            list(pipe.parameters())  # waits for the values of the other replica
        optimizer.zero_grad()
        events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        sizes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        return max(accumulate(size for _, size in sizes))

    step_peak()  # makes the optimizer's state
    local = sum(parameter.nbytes for parameter in pipe.parameters())
    state = sum(t.nbytes for values in optimizer.state.values() for t in values.values())
    above = min(step_peak() for _ in range(STEPS))
    pipe.close()
    return (local + state + above) / local


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    width = parser.parse_args().width
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    is_good = True
    for schedule, predicted in PREDICTED.items():
        measured = torch.tensor(peak(schedule, width))
        dist.all_reduce(measured, dist.ReduceOp.MAX)
        is_good &= measured.item() <= predicted + ACTIVATIONS
        if dist.get_rank() == 0:
            print(f"{schedule}: {measured.item():.2f} P, predicted {predicted} P")
    dist.destroy_process_group()
    if not is_good:
        raise SystemExit("a peak is above the prediction")


if __name__ == "__main__":
    main()
