"""Models with DTensors, parallelised by torch's own plans, train in a pipeline unchanged."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel, parallelize_module

import zbcompile
from tests.support.dtensor_models import LENGTH, VOCABULARY, Llama, loss_of, parallelised
from tests.support.exchanged import needless
from tests.support.meshes import mesh_of
from tests.support.pool import Pool
from tests.support.refused import said
from zbcompile.schedules import Pair

MICROBATCHES, ROWS = 4, 2
BOUND = 1e-6  # of the largest entry of each gradient, fp32
OPTIONS: dict[str, Any] = {"schedule": "1f1b", "microbatches": MICROBATCHES, "loss": loss_of}


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(VOCABULARY, (2, MICROBATCHES * ROWS, LENGTH)).unbind()  # type: ignore[return-value]


def accumulated(model: nn.Module) -> Tensor:
    total = torch.zeros(())
    for x, y in zip(*(item.chunk(MICROBATCHES) for item in batch()), strict=True):
        loss = loss_of(model(x), y) / MICROBATCHES
        loss.backward()
        total = total + loss.detach()
    return total


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distributed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss under `loss_parallel`, whose result is a DTensor; eager's backward begins at it."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained(kind: str, schedule: str, exact: bool) -> dict[str, Any]:
    """Returns the differences from one process, from eager DTensor in bits, and where collectives
    are. "meta": a model without memory, over a second mesh of the same ranks."""
    mesh = mesh_of(pp=dist.get_world_size() // 2, tp=2)
    layers = 2 if kind == "odd" else 1
    one, (x, y) = Llama(layers, odd=kind == "odd"), batch()
    expected = accumulated(one)
    eager, second = parallelised(mesh["tp"], kind, layers), mesh_of(a=mesh.size(0), b=2)
    with torch.device("meta" if kind == "meta" else "cpu"):
        model = parallelised((second["b"] if kind == "meta" else mesh["tp"]), kind, layers)
    options = OPTIONS | {"mesh": mesh, "schedule": schedule, "exact": exact}
    options |= {"loss": distributed_loss, "recompute": "full"} if kind == "loss" else {}
    with loss_parallel() if kind == "loss" else contextlib.nullcontext():
        accumulated(eager)
        pipe = zbcompile.pipeline(model, **options).compile(x, target=y)
        if kind == "meta":
            pipe.load_state_dict(Llama(layers).state_dict())
        pipe.step(x, target=y)
        for parameter in pipe.parameters():
            parameter.grad = None
        total = pipe.step(x, target=y)
    theirs, ones = dict(eager.named_parameters()), dict(one.named_parameters())
    far, unequal = 0.0, []
    for name, parameter in pipe.named_parameters():
        assert isinstance(parameter.grad, DTensor) == isinstance(theirs[name], DTensor)
        gradient, second = whole(parameter.grad), ones[name].grad
        far = max(far, float((gradient - second).abs().max() / second.abs().max()))
        unequal += [] if torch.equal(gradient, whole(theirs[name].grad)) else [name]
    norm, state = pipe.clip_grad_norm_(1e9), pipe.state_dict(full=True)
    pipe.load_state_dict(one.state_dict())
    full = nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None])
    steps = [step for order in pipe.program.schedule.orders for step in order]
    results = {
        "loss": abs(float(total / expected) - 1),
        "far": max(far, abs(float(norm / full) - 1)),
        "unequal": unequal,
        "state": all(torch.equal(whole(state[n]), value) for n, value in one.state_dict().items()),
        "needless": needless(pipe.program),
        "pairs": sum(isinstance(step, Pair) or step.op == "BW" for step in steps),
    }
    pipe.close()
    return results


RARE = pytest.mark.beyond_sample


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("plain", "zb-h1"),
        pytest.param("meta", "zb-h1", marks=RARE),
        pytest.param("odd", "interleaved-zb", marks=RARE),
    ],
)
def test_gradients_are_those_of_one_process(kind: str, schedule: str, pool: Pool) -> None:
    """Each rank has all stages of the pipeline; more ranks, "sequence" and "loss":
    `examples/benchmarks/composition_sweep.py --tp`."""
    for seen in pool.run(trained, kind, schedule, True, ranks=2):
        assert max(seen["far"], seen["loss"]) <= BOUND
        assert seen["state"]
        assert seen["needless"] == []
        assert seen["pairs"]
        assert seen["unequal"] == []


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.weight, "scale", 1.0)


def refused(what: str) -> None:
    """Trains what cannot be: a mesh, a model on it, options."""
    sizes = {"mesh": (2, 2), "replicas": (2, 1), "replicate": (2, 1)}.get(what, (1, 2))
    names = {"replicas": ("dp", "tp"), "replicate": ("dp", "pp"), "context": ("pp", "cp")}
    mesh = mesh_of(**dict(zip(names.get(what, ("pp", "tp")), sizes, strict=True)))
    model, (x, y), options, around = Llama(layers=1), batch(), OPTIONS, contextlib.nullcontext()
    if what == "mesh":
        second = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("pp", "tp"))
        model = parallelised(second["tp"], "plain", layers=1)
    elif what == "replicas":
        model = distribute_module(model, mesh)
    elif what == "replicate":
        model = replicate(model)
    elif what == "context":
        around = context_parallel(mesh["cp"], buffers=[x, y], buffer_seq_dims=[1, 1])
    elif what == "parts":
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Partial())
        parallelize_module(model, mesh["tp"], {"head": rows})
    elif what == "head":
        model, options = parallelised(mesh["tp"], "plain", layers=1), OPTIONS | {"vocab": 1}
    elif what == "attribute":
        model, x = nn.Sequential(Scaled(4, 4)), torch.randn(4, 4)
        parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
        model[0].weight.scale = 2.0
        x, y, options = x[:, :2], x, OPTIONS | {"microbatches": 2, "loss": F.mse_loss}
    with around:
        zbcompile.pipeline(model, mesh=mesh, **options).step(x, target=y)


def all_refused(chosen: list[str]) -> list[tuple[str, str]]:
    return [said(lambda what=what: refused(what)) for what in chosen]


REFUSED = {
    "replicas": 'is a DTensor along "dp", over which the pipeline itself',
    "attribute": "reads .scale of a tensor",
    "replicate": "Pass the module as it was before replicate()",
    "context": "inside torch's context_parallel()",
    "parts": "these ranks train on one batch and must compute one loss",
    "head": "vocab=1: ",
    "mesh": 'embedding.weight is a DTensor on the dimension "tp" of another mesh than mesh=',
}


@pytest.mark.slow
@pytest.mark.parametrize("rare", [False, pytest.param(True, marks=RARE)])
def test_bad_input_is_one_error_on_every_rank(rare: bool, pool: Pool) -> None:
    for chosen in (["parts", "head"], ["mesh"]) if rare else (list(REFUSED)[:4],):
        for results in pool.run(all_refused, chosen, ranks=4 if "mesh" in chosen else 2):
            for what, (_, text) in zip(chosen, results, strict=True):
                assert REFUSED[what] in text, text
