"""Models parallelised by hand over dimensions of a mesh train as one process does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zbcompile
from tests.support.exchanged import needless
from tests.support.parallel_models import (
    LENGTH,
    WIDTH,
    Along,
    ContextParallel,
    TensorParallel,
    enter,
    part_of,
)
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors

MICROBATCHES, ROWS, VOCABULARY = 4, 2, 13
UNEVEN = "tp plain"  # evaluates rows that microbatches do not divide
EVALUATES = (UNEVEN, "cp gather", "tp functions")
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


def errors(pipe: Any, model: Any, full: nn.Module, along: Along) -> float:
    """The largest difference of a gradient, relative to the largest entry of the whole one."""
    expected = dict(full.named_parameters())
    results = []
    for name, parameter in pipe.named_parameters():
        gradient = expected[name].grad
        results.append(
            (parameter.grad - part_of(gradient, parameter, along)).abs().max()
            / gradient.abs().max()
        )
    return float(max(results))


def in_one_process(kind: str) -> tuple[Tensor, nn.Module, Tensor]:
    model, (x, y) = model_of(kind, None), batch()
    total = torch.zeros(())
    for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        loss = getattr(model, "loss", F.mse_loss)(model(a), b) / MICROBATCHES
        loss.backward()
        total = total + loss.detach()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return total, model, norm


def evaluated(pipe: Any, full: nn.Module, mesh: DeviceMesh, x: Tensor) -> float:
    """Returns the difference of an evaluation in three microbatches; along "cp" a rank has its part."""
    results, expected = pipe.eval(x, microbatches=3), full(x).detach()
    if results.shape != expected.shape:
        expected = expected.chunk(2, dim=1)[mesh.get_local_rank("cp")]
    return float((results - expected).abs().max() / expected.abs().max())


def trained(
    kind: str, schedule: str, names: tuple[str, str], folder: Path
) -> tuple[float, float, float, float, list[str]]:
    """Two steps: of the loss, a gradient, the norm and an evaluation (of what EVALUATES) by how
    much they differ; collectives that are needless."""
    device = torch.get_default_device().type
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=names)
    model, (x, y) = model_of(kind, mesh), batch()
    total, full, norm = in_one_process(kind)
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule=schedule, **options_of(kind, model))
    for _ in range(2):
        loss = pipe.step(x, target=y)
    for parameter in full.parameters():
        parameter.grad *= 2
    within = errors(pipe, model, full, model.along)
    ours = pipe.clip_grad_norm_(1e9)
    rows = 5 if kind == UNEVEN else 6
    in_vain = needless(pipe.program)
    forward = evaluated(pipe, full, mesh, x[:rows]) if kind in EVALUATES else 0.0
    pipe.close()
    return (
        float((loss - total).abs() / total),
        within,
        float((ours / 2 - norm).abs() / norm),
        forward,
        in_vain,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "schedule", "names", "ranks"),
    [
        pytest.param(
            "tp plain", "zb-h1", ("tp", "pp"), 4, marks=pytest.mark.beyond_sample
        ),  # is run on GPUs
        pytest.param("tp functions", "zb-v", ("tp", "pp"), 2, marks=pytest.mark.beyond_sample),
        ("tp sequence", "zb-v", ("tp", "pp"), 2),
        pytest.param("cp gather", "1f1b", ("cp", "pp"), 2, marks=pytest.mark.beyond_sample),
        pytest.param("cp ulysses", "dualpipe-v", ("cp", "pp"), 2, marks=pytest.mark.beyond_sample),
        ("cp ring", "interleaved-zb", ("cp", "pp"), 2),
    ],
)
def test_gradients_are_those_of_one_process(
    kind: str, schedule: str, names: tuple[str, str], ranks: int, pool: Pool, tmp_path: Path
) -> None:
    """On two ranks the stages of the pipeline are all on the rank, next to its part of the other
    dimension."""
    for loss, gradient, norm, forward, in_vain in pool.run(
        trained, kind, schedule, names, tmp_path, ranks=ranks
    ):
        assert loss <= BOUND
        assert gradient <= BOUND
        assert norm <= BOUND
        assert forward <= BOUND
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
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(VOCABULARY, (2, MICROBATCHES * ROWS, LENGTH), generator=generator)
    for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        (loss_of_words(full(a), b) / MICROBATCHES).backward()
    placements = {f"trunk.{name}": along for name, along in TensorParallel.PLACEMENTS.items()}
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "schedule": "zb-h1", "vocab": 2}
    pipe = zbcompile.pipeline(
        model, mesh=mesh, loss=loss_of_words, placements=placements, **options
    )
    pipe.step(x, target=y)
    assert pipe.program.vocabulary is not None
    low, high = pipe.program.vocabulary.bounds[mesh["pp"].get_local_rank()]
    for layer in (full.embedding, full.head):
        rows = layer.weight.grad
        assert rows is not None
        layer.weight = nn.Parameter(layer.weight[low:high].detach())
        layer.weight.grad = rows[low:high]
    pipe.close()
    return errors(pipe, model, full, model.trunk.along)


@pytest.mark.slow
def test_a_sharded_output_layer_beside_tensor_parallelism(pool: Pool) -> None:
    assert max(pool.run(vocabulary_sharded, ranks=4)) <= BOUND


def trained_on(names: tuple[str, ...], shape: tuple[int, ...], flatten: bool) -> Any:
    """Returns the gradients on a mesh; with `flatten` two of its dimensions are joined to "dp"."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if flatten:
        mesh["dp_replicate", "dp_shard"]._flatten("dp")
    options: dict[str, Any] = {"schedule": "zb-h1", "microbatches": 2, "loss": F.mse_loss}
    pipe = zbcompile.pipeline(model, mesh=mesh["pp", "dp", "tp"] if flatten else mesh, **options)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(pipe.ranks.mesh.index("dp")))
    pipe.step(x, target=-x)
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    pipe.close()
    return gradients


@pytest.mark.slow
def test_flattened_dimensions_and_those_of_one_rank(pool: Pool) -> None:
    """They change no bit."""
    usual = pool.run(trained_on, ("pp", "dp"), (1, 2), False, ranks=2)
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    flattened = pool.run(trained_on, names, (1, 1, 2, 1), True, ranks=2)
    for ours, theirs in zip(flattened, usual, strict=True):
        assert_same_tensors(ours, theirs, "gradient of")


def bad_mesh(names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    zbcompile.pipeline(nn.Linear(2, 2), mesh=mesh, schedule="1f1b")


def different_weights(call: str) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    model, (x, y) = model_of("tp plain", mesh), batch()
    nn.init.constant_(model.layers[0].norm.weight, float(mesh["tp"].get_local_rank()))
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", **options_of("tp plain", model))
    pipe.step(x, target=y) if call == "step" else pipe.eval(x)


def undeclared_part() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    model, (x, y) = model_of("tp sequence", mesh), batch()
    options = options_of("tp sequence", model) | {"placements": model.PLACEMENTS}
    zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", **options).step(x, target=y)


def partial_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    zbcompile.pipeline(nn.Linear(2, 2), mesh=mesh["pp"], schedule="1f1b")


class OnPart(nn.Module):
    """Trains on a part of the batch along "cp", with weights whose gradients it sums itself."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.along = Along(mesh, "cp")
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        part = self.along.part(x, 1)
        for weight in self.weights:
            part = F.linear(part, enter(weight, self.along.group)).tanh()
        return part.square().mean()


def summed_already() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "cp"))
    zbcompile.pipeline(OnPart(mesh), mesh=mesh, schedule="1f1b", microbatches=2).step(batch()[0])


@pytest.mark.slow
def test_bad_input_is_one_error_on_every_rank(pool: Pool) -> None:
    shared = r'layers.0.norm.weight.*is shared by ranks 0 and 1 \(apart along "tp"\)'
    too_few = r"has 2 ranks \(pp=2 x tp=1\), but there are 4 processes"
    summed = r'the gradient of weights.\d is equal on all 2 ranks along "cp".*{"cp": "replicate"}'
    names = 'has a dimension "fsdp" of size 2.*flatten several'
    cases: list[tuple[Any, tuple[Any, ...], int, str]] = [
        (bad_mesh, (("pp", "fsdp"), (2, 2)), 4, names),
        (bad_mesh, (("pp", "tp"), (2, 1)), 4, too_few),
        (different_weights, ("step",), 2, shared),
        (different_weights, ("eval",), 2, shared),
        (partial_mesh, (), 4, r"only the part \('pp',\) of a mesh that also has \"dp\""),
        (summed_already, (), 2, summed),
        (undeclared_part, (), 2, r'the gradient of .*norm.weight differs between.*"tp": "partial"'),
    ]
    for function, args, ranks, message in cases:
        for outcome in pool.outcomes(function, *args, ranks=ranks):
            assert re.search(message, outcome.text), outcome
