"""Models with DTensors, parallelised by torch's own plans, train in a pipeline unchanged."""

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel, parallelize_module

import zbcompile
from tests.support.dtensor_models import LENGTH, VOCABULARY, Llama, loss_of, parallelised
from tests.support.exchanged import needless
from tests.support.meshes import mesh_of
from tests.support.pool import Pool
from zbcompile.model.materialize import fill
from zbcompile.schedules import Pair

MICROBATCHES, ROWS = 4, 2
BOUND = 1e-6  # of the largest entry of each gradient, fp32


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


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def distributed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss under `loss_parallel`, whose result is a DTensor; eager's backward begins at it."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained(kind: str, schedule: str, exact: bool, disturbed: bool = True) -> dict[str, Any]:
    """Returns the differences from one process, from eager DTensor in bits, and where collectives are; a
    `disturbed` training ends with a NaN, after which no rank can reach another."""
    mesh = mesh_of(pp=dist.get_world_size() // 2, tp=2)
    layers = 2 if kind == "odd" else 1
    one = Llama(layers, odd=kind == "odd")
    expected = accumulated(one)
    around = loss_parallel() if kind == "loss" else contextlib.nullcontext()
    eager, model = parallelised(mesh["tp"], kind, layers), parallelised(mesh["tp"], kind, layers)
    with around:
        accumulated(eager)
        loss = distributed_loss if kind == "loss" else loss_of
        options: dict[str, Any] = {
            "microbatches": MICROBATCHES,
            "loss": loss,
            "debug_nan": kind == "plain",
            "recompute": "full" if kind == "loss" else "hints",
        }
        pipe = zbcompile.pipeline(model, mesh=mesh, schedule=schedule, exact=exact, **options)
        x, y = batch()
        pipe.step(x, target=y)
        for parameter in pipe.parameters():
            parameter.grad = None
        total = pipe.step(x, target=y)
    theirs, ones = dict(eager.named_parameters()), dict(one.named_parameters())
    far, unequal = 0.0, []
    for name, parameter in pipe.named_parameters():
        assert isinstance(parameter.grad, DTensor) == isinstance(theirs[name], DTensor)
        gradient, second = whole(parameter.grad), ones[name].grad
        assert second is not None
        far = max(far, float((gradient - second).abs().max() / second.abs().max()))
        unequal += [] if torch.equal(gradient, whole(theirs[name].grad)) else [name]
    norm = pipe.clip_grad_norm_(1e9)
    state = pipe.state_dict(full=True)
    pipe.load_state_dict(one.state_dict())
    whole_norm = nn.utils.get_total_norm([p.grad for p in one.parameters() if p.grad is not None])
    results = {
        "loss": float((total - expected).abs() / expected),
        "far": far,
        "unequal": unequal,
        "norm": float((norm - whole_norm).abs() / whole_norm),
        "state": all(
            torch.equal(whole(state[name]), value) for name, value in one.state_dict().items()
        ),
        "needless": needless(pipe.program),
        "pairs": sum(
            isinstance(step, Pair) or step.op == "BW"
            for order in pipe.program.schedule.orders
            for step in order
        ),
    }
    nan = {"nan": said_of_a_nan(pipe)} if kind == "plain" and disturbed else {}
    pipe.close()
    return results | nan


def said_of_a_nan(pipe: Any) -> str:
    """Returns the report of a NaN in a parameter of one rank."""
    x, y = batch()
    with torch.no_grad():
        if dist.get_rank() == dist.get_world_size() - 1:
            next(p for p in pipe.parameters() if isinstance(p, DTensor)).to_local().fill_(
                float("nan")
            )
    try:
        pipe.step(x, target=y)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "schedule", "exact", "ranks"),
    [
        ("plain", "zb-h1", True, 2),
        ("loss", "zb-v", False, 2),
        ("sequence", "zb-h1", True, 2),
        pytest.param("odd", "interleaved-zb", True, 2, marks=pytest.mark.beyond_sample),
        pytest.param("plain", "zb-h1", True, 4, marks=pytest.mark.beyond_sample),
    ],
)
def test_gradients_are_those_of_one_process(
    kind: str, schedule: str, exact: bool, ranks: int, pool: Pool
) -> None:
    """On two ranks each has all stages of the pipeline; also a NaN that one rank has."""
    results = pool.run(trained, kind, schedule, exact, ranks=ranks)
    pool.group = None  # which the NaN has ended
    for seen in results:
        assert seen["loss"] <= BOUND
        assert seen["far"] <= BOUND
        assert seen["norm"] <= BOUND
        assert seen["state"]
        assert seen["needless"] == []
        assert seen["pairs"]
        assert not exact or seen["unequal"] == []
        if kind == "plain":
            assert re.search(r"of stage \d receives a NaN in parameter", seen["nan"])


def filled(name: str, tensor: Tensor) -> None:
    nn.init.normal_(tensor, 1.0, 0.1) if tensor.dim() == 1 else nn.init.normal_(tensor, 0.0, 0.1)


def from_the_meta_device(on_meta: bool) -> dict[str, Tensor]:
    """The whole tensors of a model with DTensors, and their gradients, if it is built over a second
    mesh of the same ranks, with memory or without."""
    mesh, (x, y) = mesh_of(pp=1, tp=2), batch()
    second = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    with torch.device("meta" if on_meta else "cpu"):
        model = parallelised(second["b"], "plain", layers=1)
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": MICROBATCHES, "loss": loss_of}
    pipe = zbcompile.pipeline(
        model, mesh=mesh, init=filled if on_meta else None, **options
    ).compile(x, target=y)
    if not on_meta:
        one = Llama(layers=1)
        for name, parameter in one.named_parameters():
            fill(filled, 0, name, parameter)
        pipe.load_state_dict(one.state_dict())
    pipe.step(x, target=y)
    gradients = {
        f"{name}.grad": whole(parameter.grad).clone() for name, parameter in pipe.named_parameters()
    }
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    return gradients | {
        name: whole(tensor).clone() for name, tensor in pipe.state_dict(full=True).items()
    }


@pytest.mark.slow
def test_dtensors_of_a_second_mesh_and_on_the_meta_device(pool: Pool) -> None:
    """`init` fills whole tensors, so that their values do not depend on the mesh."""
    results, expected = (
        pool.run(from_the_meta_device, on_meta, ranks=2)[0] for on_meta in (True, False)
    )
    assert len(results) == 2 * len(list(Llama(layers=1).parameters()))
    assert all(torch.equal(results[name], expected[name]) for name in expected)


def on_another_mesh() -> None:
    mesh, second = (
        mesh_of(pp=2, tp=2),
        DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("pp", "tp")),
    )
    zbcompile.pipeline(
        parallelised(second["tp"], "plain", layers=1), mesh=mesh, schedule="1f1b", loss=loss_of
    )


def along_replicas() -> None:
    model = distribute_module(Llama(layers=1), mesh := mesh_of(dp=2, tp=1))
    zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", loss=loss_of)


def replicated() -> None:
    zbcompile.pipeline(
        replicate(nn.Linear(2, 2)), mesh=mesh_of(dp=2), schedule="1f1b", loss=F.mse_loss
    )


def in_context_parallel() -> None:
    mesh, (x, y) = mesh_of(pp=1, cp=2), batch()
    with context_parallel(mesh["cp"], buffers=[x, y], buffer_seq_dims=[1, 1]):
        zbcompile.pipeline(Llama(layers=1), mesh=mesh, schedule="1f1b", loss=loss_of).step(
            x, target=y
        )


def parts_as_output() -> None:
    mesh, (x, y) = mesh_of(pp=1, tp=2), batch()
    model, plan = (
        Llama(layers=1),
        {"head": RowwiseParallel(input_layouts=Replicate(), output_layouts=Partial())},
    )
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": MICROBATCHES, "loss": loss_of}
    zbcompile.pipeline(parallelize_module(model, mesh["tp"], plan), mesh=mesh, **options).step(
        x, target=y
    )


def head_sharded_twice() -> None:
    mesh, (x, y) = mesh_of(pp=2, tp=2), batch()
    model = parallelised(mesh["tp"], "plain", layers=1)
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": MICROBATCHES, "loss": loss_of}
    zbcompile.pipeline(model, mesh=mesh, vocab=1, **options).compile(x, target=y)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.weight, "scale", 1.0)


def reads_an_attribute() -> None:
    mesh, x = mesh_of(pp=1, tp=2), torch.randn(4, 4)
    model = parallelize_module(nn.Sequential(Scaled(4, 4)), mesh["tp"], {"0": RowwiseParallel()})
    model[0].weight.scale = 2.0
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "loss": nn.MSELoss()}
    zbcompile.pipeline(model, mesh=mesh, **options).step(x[:, :2], target=x)


@pytest.mark.slow
def test_bad_input_is_one_error_on_every_rank(pool: Pool) -> None:
    cases = [
        (
            on_another_mesh,
            4,
            'embedding.weight is a DTensor on the dimension "tp" of another mesh than mesh=',
        ),
        (parts_as_output, 2, "these ranks train on one batch and must compute one loss"),
        (head_sharded_twice, 4, "vocab=1: "),
        (along_replicas, 2, 'is a DTensor along "dp", over which the pipeline itself'),
        (reads_an_attribute, 2, "reads .scale of a tensor"),
        (replicated, 2, "Pass the module as it was before replicate()"),
        (in_context_parallel, 2, "inside torch's context_parallel()"),
    ]
    for function, ranks, message in cases:
        for outcome in pool.outcomes(function, ranks=ranks):
            assert message in outcome.text, outcome
