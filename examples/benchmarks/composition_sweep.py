"""Compares pipelines in a mesh of several dimensions with one process, in a checkout:

    torchrun --standalone --nproc-per-node 4 examples/benchmarks/composition_sweep.py       every schedule at dp2 x pp2
    torchrun --standalone --nproc-per-node 8 examples/benchmarks/composition_sweep.py       some at dp2 x pp2 x tp2
    torchrun --standalone --nproc-per-node 4 examples/benchmarks/composition_sweep.py --tp  some at pp2 x tp2

A Llama in fp32, with tp by torch's plans with sequence parallelism; each replica has a batch of its
own. Printed are the largest differences of the loss and of a gradient, relative to the largest
entry of that gradient, over all ranks. With --tp: columns and rows (exact=True, whose bits must be
those of eager DTensor), then sequence parallelism, then loss_parallel; in none of them a collective
of a weight gradient, or one that could be done once per step.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zbcompile
from tests.support.dtensor_models import LENGTH, VOCABULARY, Llama, loss_of, parallelised
from tests.zbcompile.engine.test_dtensor import trained

BOUND = 2e-6
LAYERS, REPLICAS, MICROBATCHES = 2, 2, 8
KINDS = ("plain", "sequence", "loss")
WITH_TP = ("1f1b", "zb-h1", "zb-v", "dualpipe-v", "interleaved-zb")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--schedules", nargs="+", help="default: all; with tp " + ", ".join(WITH_TP)
    )
    parser.add_argument("--tp", action="store_true", help="pp2 x tp2, with four processes")
    return parser.parse_args()


def batches() -> tuple[Tensor, Tensor]:
    """Tokens and targets of all replicas, two rows for each microbatch."""
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (2, REPLICAS * MICROBATCHES * 2, LENGTH)).unbind()  # type: ignore[return-value]


def in_one_process() -> tuple[Tensor, nn.Module]:
    """The loss, and the model with its gradients."""
    model, total = Llama(LAYERS), torch.zeros(())
    parts = (tensor.chunk(REPLICAS * MICROBATCHES) for tensor in batches())
    for x, y in zip(*parts, strict=True):
        loss = loss_of(model(x), y) / (REPLICAS * MICROBATCHES)
        loss.backward()
        total = total + loss.detach()
    return total, model


def difference(schedule: str, mesh: DeviceMesh, expected: Tensor, one: nn.Module) -> Tensor:
    """Returns the relative differences of the loss and of the worst gradient on this rank."""
    parallel = "tp" in (mesh.mesh_dim_names or ())
    model = parallelised(mesh["tp"], "sequence", LAYERS) if parallel else Llama(LAYERS)
    pipe = zbcompile.pipeline(
        model, mesh=mesh, schedule=schedule, microbatches=MICROBATCHES, loss=loss_of
    )
    x, y = (tensor.chunk(REPLICAS)[mesh["dp"].get_local_rank()] for tensor in batches())
    loss = pipe.step(x, target=y)
    ones, far = dict(one.named_parameters()), 0.0
    for name, parameter in pipe.named_parameters():
        gradient, reference = parameter.grad, ones[name].grad
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[union-attr]
        far = max(far, float((full - reference).abs().max() / reference.abs().max()))  # type: ignore[operator, union-attr]
    pipe.close()
    return torch.tensor([float((loss - expected).abs() / expected), far])


def with_tensor_parallelism(log: Callable[..., None], schedules: Sequence[str]) -> list[bool]:
    """Returns for each plan and schedule if the gradients are within the bound."""
    results = []
    for kind, schedule in product(KINDS, schedules):
        result = trained(kind, schedule, kind == "plain")
        far = torch.tensor(
            [result["loss"], result["far"], len(result["needless"]), len(result["unequal"])]
        )
        dist.all_reduce(far, dist.ReduceOp.MAX)
        loss, gradients, needless, unequal = far.tolist()
        bits = f"  bits of {unequal:.0f} gradients differ" if kind == "plain" else ""
        log(
            f"{kind:9} {schedule:15} loss {loss:.1e}  gradients {gradients:.1e}  needless"
            f" {needless:.0f}{bits}",
            flush=True,
        )
        results.append(
            max(loss, gradients) <= BOUND / 2 and not needless and not (kind == "plain" and unequal)
        )
    return results


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options = arguments()
    if options.tp:
        results = with_tensor_parallelism(
            print if dist.get_rank() == 0 else lambda *_, **__: None, options.schedules or WITH_TP
        )
        dist.destroy_process_group()
        return 0 if all(results) else 1
    names = ("dp", "pp", "tp") if dist.get_world_size() == 8 else ("dp", "pp")
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    log = print if os.environ["RANK"] == "0" else lambda *_, **__: None
    expected, one = in_one_process()
    chosen = options.schedules or (WITH_TP if "tp" in names else zbcompile.schedules.names())
    results = []
    for schedule in chosen:
        start = time.perf_counter()
        result = difference(schedule, mesh, expected, one)
        dist.all_reduce(result, dist.ReduceOp.MAX)
        results.append(bool((result <= BOUND).all()))
        took = time.perf_counter() - start
        log(
            f"{took:6.1f} s  {schedule:24} loss {result[0].item():.1e}  gradients"
            f" {result[1].item():.1e}",
            flush=True,
        )
    log(
        f"{sum(results)} of {len(results)} schedules within {BOUND:g} of one process at"
        f" {' x '.join(names)}, 2 each"
    )
    dist.destroy_process_group()
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
