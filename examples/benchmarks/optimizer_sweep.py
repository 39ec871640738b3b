"""Compares optimizers of a pipeline (zero=1, updates inside of the step) with a plain one, in a
checkout:

    torchrun --standalone --nproc-per-node 4 examples/benchmarks/optimizer_sweep.py
    torchrun --standalone --nproc-per-node 4 examples/benchmarks/optimizer_sweep.py --part kinds
    torchrun --standalone --nproc-per-node 4 examples/benchmarks/optimizer_sweep.py --part validation
    torchrun --standalone --nproc-per-node 4 examples/benchmarks/optimizer_sweep.py --part bounds  # or 8
    torchrun --standalone --nproc-per-node 8 examples/benchmarks/optimizer_sweep.py --part tensors

`levels`, at dp2 x pp2: losses, norms and parameters of 20 updates are compared bit by bit with
`zero=0`, for `zero=1`, updated after the step and inside of it (with clipping: `validate="after"`),
and the bytes of the optimizer's state are counted. `kinds`: the same for torch's optimizers that
can be divided, and for Lion, one with 8 bits and one like Shampoo; parameters in float32 and
bfloat16, with clipping and without. `validation`, at pp4: 40 updates with three clips and an
infinity in the last one. `bounds`, at dp4, where replicas add in another order: gradients at equal
parameters, and parameters after 20 updates by SGD, relative to the largest entry. `tensors`, at dp2
x pp2 x tp2 with `parallelize_module`: parameters after 20 updates are bit by bit those of `zero=0`,
and by SGD as close to the unsplit model's as in `bounds`.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zbcompile
from tests.support.optimizers import OPTIMIZERS
from tests.support.oracle import PROBLEMS
from tests.support.replicated import MICROBATCHES, ROWS
from tests.support.sharded_optimizers import Result, Training, trained
from tests.support.training import assert_same_tensors, compiled_once
from tests.zbcompile.optimizer import disturbed_training
from tests.zbcompile.optimizer.disturbed_training import STEPS, assert_bitwise, disturbed
from zbcompile.model.distributed_tensors import is_distributed
from zbcompile.optimizer.pipeline_optimizer import PipelineOptimizer

UPDATES, BOUND, LR = 20, 2e-6, 1e-2
Row = tuple[str, bool]  # what was found, and whether it is as promised


def levels() -> Iterator[Row]:
    """Bit by bit at dp2 x pp2, and the bytes of this rank's state."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    for schedule in ("zb-h1", "zb-v", "dualpipe-v"):
        for clip in (None, 0.05):
            usual = Training("small-tied", schedule, clip=clip, updates=UPDATES)
            inside = replace(
                usual, overlap=clip is None, validate="before" if clip is None else "after"
            )
            with compiled_once("small-tied float32", exact=True):
                expected = trained(usual, 0, mesh)
                cases = [(usual, 1), (inside, 0), (inside, 1)]
                results = [trained(entry, zero, mesh) for entry, zero in cases]
            equal = all(same(result, expected) for result in results)
            state_bytes = {
                zero: result.held for (_, zero), result in zip(cases, results, strict=True)
            }
            fair = state_bytes[1] <= expected.held / 2 + 512
            text = (
                f"{schedule:10} clip={clip}: {len(results)} runs bitwise {equal}; bytes of state by"
                f" zero: {state_bytes}"
            )
            yield text, equal and fair


def kinds() -> Iterator[Row]:
    """Bit by bit at dp2 x pp2, with each optimizer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    for dtype, kind in product(("float32", "bfloat16"), OPTIMIZERS):
        result = []
        with compiled_once(f"short-mlp {dtype}", exact=True):
            for clip in (None, 0.05):
                usual = Training("short-mlp", "zb-v", kind=kind, dtype=dtype, clip=clip, updates=5)
                inside = replace(
                    usual, overlap=clip is None, validate="before" if clip is None else "after"
                )
                expected = trained(usual, 0, mesh)
                result += [
                    same(trained(entry, zero, mesh), expected)
                    for entry in (usual, inside)
                    for zero in range(2)
                ]
        yield f"{kind:12} {dtype:8}: {len(result)} runs bitwise {all(result)}", all(result)


def same(result: Result, expected: Result) -> bool:
    try:
        for entry in ("losses", "norms", "state"):
            assert_same_tensors(getattr(result, entry), getattr(expected, entry), entry)
    except AssertionError as error:
        print(error)
        return False
    return True


def validation() -> Iterator[Row]:
    """Post-validation on four ranks, which go on before the others have ended a step."""
    problem = PROBLEMS["mlp"]
    for schedule in ("zb-h2", "zb-2p", "zb-v"):
        batches = [disturbed(b, step) for step, b in enumerate(problem.batches(STEPS, 8 * ROWS))]
        result = []
        with compiled_once("mlp", exact=True):
            for when in ("before", "after"):
                pipe = zbcompile.pipeline(
                    problem.model(),
                    schedule=schedule,
                    microbatches=8,
                    loss=problem.loss,
                    exact=True,
                )
                result.append(disturbed_training.trained(pipe, batches, validate=when))
                pipe.close()
        try:
            assert_bitwise(result[1], result[0])
            equal = True
        except AssertionError:
            equal = False
        yield (
            f"{schedule:10}: bitwise {equal} over {STEPS} updates; corrected here: {result[1][3]}",
            equal,
        )


def bounds() -> Iterator[Row]:
    """Four replicas of one rank, with eight processes of two, each of which has a part of what it
    is compared with."""
    mesh = init_device_mesh("cpu", (4, dist.get_world_size() // 4), mesh_dim_names=("dp", "pp"))
    expected_gradients, expected = by_sgd(0, mesh)
    gradients, state = by_sgd(1, mesh)
    far = torch.tensor([furthest(gradients, expected_gradients), furthest(state, expected)])
    dist.all_reduce(far, dist.ReduceOp.MAX)
    yield (
        f"zero=1: gradients {far[0].item():.1e}, parameters {far[1].item():.1e}",
        bool((far <= BOUND).all()),
    )


Parts = dict[tuple[str, int], torch.Tensor]  # by parameter, and where they begin in it


def by_sgd(zero: int, mesh: DeviceMesh) -> tuple[Parts, Parts]:
    """The gradients that this process has after the first step, and the parameters after
    the last."""
    problem = PROBLEMS["mlp"]
    gradients: Parts = {}
    pipe = zbcompile.pipeline(
        problem.model(), schedule="1f1b", microbatches=MICROBATCHES, loss=problem.loss, mesh=mesh
    )
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, zero=zero)
    for batch in problem.batches(UPDATES, 4 * MICROBATCHES * ROWS):
        part = list(batch.parts(4))[mesh["dp"].get_local_rank()]
        pipe.step(*part.args, target=part.target)
        gradients = gradients or gradients_here(pipe, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    state = {
        (name, 0): value.flatten().clone() for name, value in pipe.state_dict(full=True).items()
    }
    pipe.close()
    return gradients, state


def gradients_here(pipe: zbcompile.Pipeline, optimizer: PipelineOptimizer) -> Parts:
    if not optimizer.parameters.zero:
        result = ((name, parameter.grad) for name, parameter in pipe.named_parameters())
        return {(name, 0): entry.flatten().clone() for name, entry in result if entry is not None}
    begins = {
        name: begin
        for buffer in optimizer.parameters.buffers
        for name in buffer.parameters
        for replica, begin, _ in buffer.parts(name)
        if replica == buffer.replica
    }
    tensors = optimizer.parameters.tensors
    gradients = [(entry.name, entry.tensor.grad) for entry in tensors]
    return {(name, begins[name]): grad.clone() for name, grad in gradients if grad is not None}


def furthest(parts: Parts, expected: Parts) -> float:
    """The largest difference, relative to the largest entry of what it is a part of."""
    pairs = ((part, expected[name, 0], begin) for (name, begin), part in parts.items())
    return max(
        float((part - all_[at : at + len(part)]).abs().max() / all_.abs().max())
        for part, all_, at in pairs
    )


def tensors() -> Iterator[Row]:
    """Levels next to DTensors; after SGD also the unsplit model, trained on the batches of both
    replicas."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.randn(2, 2 * MICROBATCHES * ROWS, 16, generator=generator) for _ in range(UPDATES)
    ]
    eager = of_matrices()
    optimizer = torch.optim.SGD(eager.parameters(), lr=LR)
    for x, target in batches:
        nn.functional.mse_loss(eager(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {
        (name, 0): parameter.detach().flatten() for name, parameter in eager.named_parameters()
    }
    for kind, schedule in product((torch.optim.AdamW, torch.optim.SGD), ("zb-h1", "zb-v")):
        levels = list(product(range(2), (False, True)))
        result = [with_tensors(mesh, batches, schedule, kind, *level) for level in levels]
        equal = all(
            torch.equal(entry[name], result[0][name]) for entry in result for name in result[0]
        )
        text = f"{kind.__name__:5} {schedule:6}: {len(result)} runs bitwise {equal}"
        if kind is torch.optim.SGD:
            far = furthest(
                {(name, 0): value.flatten() for name, value in result[0].items()}, expected
            )
            text, equal = f"{text}, from the unsplit model {far:.1e}", equal and far < BOUND
        yield text, equal


def of_matrices() -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4)]
    return nn.Sequential(*pairs)


def with_tensors(
    mesh: DeviceMesh,
    batches: list[torch.Tensor],
    schedule: str,
    kind: type[torch.optim.Optimizer],
    zero: int,
    overlap: bool,
) -> dict[str, torch.Tensor]:
    """The whole parameters after the updates."""
    model = of_matrices()
    for pair in model:
        parallelize_module(pair, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    options: dict[str, Any] = {"schedule": schedule, "microbatches": MICROBATCHES, "exact": True}
    pipe = zbcompile.pipeline(model, loss=nn.functional.mse_loss, mesh=mesh, **options)
    optimizer = pipe.optimizer(kind, lr=LR, zero=zero, overlap=overlap)
    for batch in batches:
        x, target = batch.chunk(2, dim=1)[mesh["dp"].get_local_rank()]
        pipe.step(x, target=target)
        optimizer.step()
        optimizer.zero_grad()
    state = pipe.state_dict(full=True)
    result = {
        name: (value.full_tensor() if is_distributed(value) else value).clone()
        for name, value in state.items()
    }
    pipe.close()
    return result


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "levels": levels,
    "kinds": kinds,
    "validation": validation,
    "bounds": bounds,
    "tensors": tensors,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--part", choices=PARTS, default="levels")
    part = PARTS[parser.parse_args().part]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    promised, began = [], time.perf_counter()
    for text, passed in part():
        on_all_ranks = torch.tensor(float(passed))
        dist.all_reduce(on_all_ranks, dist.ReduceOp.MIN)
        promised.append(bool(on_all_ranks))
        if os.environ["RANK"] == "0":
            print(
                f"{time.perf_counter() - began:6.1f} s  {text}; on all ranks: {promised[-1]}",
                flush=True,
            )
    dist.destroy_process_group()
    return 0 if all(promised) else 1


if __name__ == "__main__":
    sys.exit(main())
