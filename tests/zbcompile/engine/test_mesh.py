"""Models parallelised by hand over dimensions of a mesh train as one process does; and meshes, models
and collectives that are refused."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
from moe import Experts
from tests.support.exchanged import needless
from tests.support.parallel_models import (
    LENGTH,
    WIDTH,
    Along,
    ContextParallel,
    TensorParallel,
    enter,
)
from tests.support.pool import Pool
from tests.support.refused import said

MICROBATCHES, ROWS, VOCABULARY = 4, 2, 13
BOUND = 1e-6  # of the largest entry of each gradient, fp32


def model_of(kind: str, mesh: Any) -> Any:
    name, _, form = kind.partition(" ")
    return ContextParallel(mesh, form) if name == "cp" else TensorParallel(mesh, form)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, MICROBATCHES * ROWS, LENGTH, WIDTH).unbind()


def options_of(kind: str, model: Any) -> dict[str, Any]:
    placements = model.PLACEMENTS | ({"*norm*": {"tp": "partial"}} if kind == "tp sequence" else {})
    loss = getattr(model, "loss", F.mse_loss)
    return {"microbatches": MICROBATCHES, "loss": loss, "placements": placements}


def accumulated(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
    total = torch.stack([loss(model(a), b) / MICROBATCHES for a, b in parts]).sum()
    total.backward()
    return total.detach()


def far(pipe: Any, full: nn.Module, along: Along) -> float:
    """The largest difference of a gradient, relative to the largest entry of the whole one."""
    worst = 0.0
    for name, parameter in pipe.named_parameters():
        part = whole = full.get_parameter(name).grad
        for dim in range(whole.ndim):
            if part.shape[dim] != parameter.shape[dim]:
                part = along.part(part, dim)
        worst = max(worst, float((parameter.grad - part).abs().max() / whole.abs().max()))
    return worst


def trained(
    kind: str, schedule: str, names: tuple[str, str]
) -> tuple[float, float, float, float, list[str]]:
    """Two steps: by how much the loss, a gradient, the norm and an evaluation differ; collectives
    that are needless."""
    device = torch.get_default_device().type
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=names)
    model, full, (x, y) = model_of(kind, mesh), model_of(kind, None), batch()
    total = accumulated(full, getattr(full, "loss", F.mse_loss), x, y)
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule=schedule, **options_of(kind, model))
    for _ in range(2):
        loss = pipe.step(x, target=y)
    for parameter in full.parameters():
        parameter.grad *= 2
    gradient, norm = far(pipe, full, model.along), pipe.clip_grad_norm_(1e9)
    expected = nn.utils.get_total_norm([p.grad for p in full.parameters()])
    rows = 5 if kind.startswith("tp") else 6  # five are not divided by three microbatches
    output = forward = torch.ones(())
    if kind != "tp sequence":
        output, forward = pipe.eval(x[:rows], microbatches=3), full(x[:rows]).detach()
    if output.shape != forward.shape:
        forward = model.along.part(forward, 1)
    in_vain = needless(pipe.program)
    pipe.close()
    pairs = ((loss, total), (norm, expected), (output, forward))
    return gradient, *(float((a - b).abs().max() / b.abs().max()) for a, b in pairs), in_vain


RARE = pytest.mark.beyond_sample


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("tp sequence", "zb-v"),
        pytest.param("tp functions", "zb-v", marks=RARE),
        pytest.param("cp gather", "1f1b", marks=RARE),
        pytest.param("cp ulysses", "dualpipe-v", marks=RARE),
        pytest.param("cp ring", "interleaved-zb", marks=RARE),
    ],
)
def test_gradients_are_those_of_one_process(kind: str, schedule: str, pool: Pool) -> None:
    """Each rank has all stages of the pipeline, next to its part of the other dimension; on four
    GPUs: test_cuda_composition.py."""
    for *errors, in_vain in pool.run(trained, kind, schedule, (kind[:2], "pp"), ranks=2):
        assert max(errors) <= BOUND, errors
        assert in_vain == []


class Words(nn.Module):
    """Embedding and output layer complete on every rank, tensor parallelism between them."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.trunk = TensorParallel(mesh, "plain")
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.trunk(self.embedding(tokens)))  # type: ignore[no-any-return]


def loss_of_words(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def vocabulary_sharded() -> float:
    """Returns the largest difference of a gradient from that of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    model, full = Words(mesh), Words(None)
    x, y = torch.randint(VOCABULARY, (2, MICROBATCHES * ROWS, LENGTH))
    accumulated(full, loss_of_words, x, y)
    placements = {f"trunk.{name}": along for name, along in TensorParallel.PLACEMENTS.items()}
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "schedule": "zb-h1", "vocab": 2}
    options |= {"mesh": mesh, "placements": placements, "loss": loss_of_words}
    pipe = zbcompile.pipeline(model, **options)
    pipe.step(x, target=y)
    low, high = pipe.program.vocabulary.bounds[mesh["pp"].get_local_rank()]
    for layer in (full.embedding, full.head):
        gradient = layer.weight.grad[low:high]
        layer.weight = nn.Parameter(layer.weight[low:high].detach())
        layer.weight.grad = gradient
    pipe.close()
    return far(pipe, full, model.trunk.along)


@pytest.mark.slow
@pytest.mark.beyond_sample
def test_a_sharded_output_layer_beside_tensor_parallelism(pool: Pool) -> None:
    assert max(pool.run(vocabulary_sharded, ranks=4)) <= BOUND


def bad_mesh(names: tuple[str, ...], shape: tuple[int, ...], part: str = "") -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    zbcompile.pipeline(nn.Linear(2, 2), mesh=mesh[part] if part else mesh, schedule="1f1b")


def different_weights() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    model, (x, y) = model_of("tp plain", mesh), batch()
    nn.init.constant_(model.layers[0].norm.weight, float(mesh["tp"].get_local_rank()))
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", **options_of("tp plain", model))
    pipe.step(x, target=y)


class OnPart(nn.Module):
    """Trains on a part of the batch along "cp", with weights whose gradients it sums itself."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along = Along(mesh, "cp")
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        part = self.along.part(x, 1)
        for weight in self.weights:
            part = F.linear(part, enter(weight, self.along.group)).tanh()
        return part.square().mean()


class Plain(nn.Linear):
    """Exchanges as torch.distributed's own calls do, which autograd does not see."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        dist.all_reduce(y)
        return y.square().mean()


class Branching(nn.Module):
    """Exchanges in a branch that some ranks may not take."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.layer = Experts(WIDTH, dist.group.WORLD), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.experts, self.layer, (x,)).square().mean()


def refused_model(kind: str) -> None:
    mesh, x = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "cp")), batch()[0]
    made = {"part": lambda: OnPart(mesh), "plain": lambda: Plain(WIDTH, WIDTH), "branch": Branching}
    mesh = mesh if kind == "part" else None
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "mesh": mesh}
    zbcompile.pipeline(made[kind](), **options).step(x if kind == "part" else x.flatten(0, 1))


def all_said(calls: list[Any]) -> list[tuple[str, str]]:
    return [said(call) for call in calls]


@pytest.mark.slow
@pytest.mark.parametrize("rare", [False, pytest.param(True, marks=RARE)])
def test_bad_input_is_one_error_on_every_rank(rare: bool, pool: Pool) -> None:
    shared = r'layers.0.norm.weight.*is shared by ranks 0 and 1 \(apart along "tp"\)'
    summed = r'the gradient of weights.\d is equal on all 2 ranks along "cp".*{"cp": "replicate"}'
    sizes = r"has 1 ranks along \('pp', 'tp'\), and there are 2 processes"
    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (bad_mesh, (("pp", "fsdp"), (1, 2)), 'has a dimension "fsdp" of size 2.*flatten several'),
        (bad_mesh, (("pp", "tp"), (1, 1)), sizes),
        (bad_mesh, (("dp", "pp"), (2, 1), "pp"), r"has 1 ranks along \('pp',\), and there are 2"),
        (different_weights, (), shared),
        (refused_model, ("part",), summed),
        (refused_model, ("plain",), "calls torch.distributed.all_reduce on an activation"),
        (refused_model, ("branch",), "communicates inside of torch.cond"),
    ]
    chosen = cases[-1:] if rare else cases[:-1]
    for texts in pool.run(all_said, [partial(function, *args) for function, args, _ in chosen]):
        for (_, text), (*_, message) in zip(texts, chosen, strict=True):
            assert re.search(message, text), text
