"""The pipeline beside other dimensions of a mesh, held against one process, in a checkout:

    torchrun --standalone --nproc-per-node 4 examples/benchmarks/composition_sweep.py       every schedule at dp2 x pp2
    torchrun --standalone --nproc-per-node 8 examples/benchmarks/composition_sweep.py       some at dp2 x pp2 x tp2

A Llama in fp32, with tp by torch's plans with sequence parallelism; each replica has a batch of its own. Printed are
the largest differences of the loss and of a gradient, relative to the largest entry of that gradient, over all ranks.
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402

import zbcompile  # noqa: E402
from tests.support.dtensor_models import LENGTH, VOCABULARY, Llama, loss_of, parallelised  # noqa: E402

BOUND = 2e-6
LAYERS, REPLICAS, MICROBATCHES = 2, 2, 8
WITH_TP = ("1f1b", "zb-h1", "zb-v", "dualpipe-v", "interleaved-zb")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--schedules", nargs="+", help="default: all; with tp " + ", ".join(WITH_TP))
    return parser.parse_args()


def batches() -> tuple[Tensor, Tensor]:
    """Tokens and targets of all replicas, two rows for each microbatch."""
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (2, REPLICAS * MICROBATCHES * 2, LENGTH)).unbind()  # type: ignore[return-value]


def in_one_process() -> tuple[Tensor, nn.Module]:
    """The loss, and the model with its gradients."""
    model, total = Llama(LAYERS), torch.zeros(())
    parts = (each.chunk(REPLICAS * MICROBATCHES) for each in batches())
    for x, y in zip(*parts, strict=True):
        loss = loss_of(model(x), y) / (REPLICAS * MICROBATCHES)
        loss.backward()
        total = total + loss.detach()
    return total, model


def difference(schedule: str, mesh: DeviceMesh, expected: Tensor, one: nn.Module) -> Tensor:
    """Of the loss and of the gradient that is furthest away, on this rank."""
    parallel = "tp" in (mesh.mesh_dim_names or ())
    model = parallelised(mesh["tp"], "sequence", LAYERS) if parallel else Llama(LAYERS)
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule=schedule, microbatches=MICROBATCHES, loss=loss_of)
    x, y = (each.chunk(REPLICAS)[mesh["dp"].get_local_rank()] for each in batches())
    loss = pipe.step(x, target=y)
    ones, far = dict(one.named_parameters()), 0.0
    for name, parameter in pipe.named_parameters():
        gradient, other = parameter.grad, ones[name].grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[union-attr]
        far = max(far, float((whole - other).abs().max() / other.abs().max()))  # type: ignore[operator, union-attr]
    pipe.close()
    return torch.tensor([float((loss - expected).abs() / expected), far])


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = ("dp", "pp", "tp") if dist.get_world_size() == 8 else ("dp", "pp")
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    say = print if os.environ["RANK"] == "0" else lambda *_, **__: None
    expected, one = in_one_process()
    chosen = arguments().schedules or (WITH_TP if "tp" in names else zbcompile.schedules.names())
    results = []
    for schedule in chosen:
        start = time.perf_counter()
        found = difference(schedule, mesh, expected, one)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        results.append(bool((found <= BOUND).all()))
        took = time.perf_counter() - start
        say(f"{took:6.1f} s  {schedule:24} loss {found[0].item():.1e}  gradients {found[1].item():.1e}", flush=True)
    say(f"{sum(results)} of {len(results)} schedules within {BOUND:g} of one process at {' x '.join(names)}, 2 each")
    dist.destroy_process_group()
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
