"""Tensor, sequence, context and expert parallel models: pass graphs have the bits of eager mode, and
are equal on all ranks. DTensors: `tests/zbcompile/engine/test_dtensor.py`."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support import parallel_models
from tests.support.dtensor_models import LENGTH, VOCABULARY, Llama
from tests.support.meshes import mesh_of
from tests.support.parallel_models import ContextParallel, Dispatched, Enter, TensorParallel
from tests.support.pass_graph_runner import Batch, Runner, compile_step, differences, eager_step
from tests.support.pool import Pool
from zbcompile import schedules
from zbcompile.passes.capture.export import ExportOptions, export_training_step
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import graph_text
from zbcompile.passes.graph.process_groups import collective_name, groups_of_meshes, is_collective

MICROBATCHES = 2


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text() -> Batch:
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    return (tokens,), {}, tokens


def by_hand(name: str, form: str) -> dict[str, Any]:
    """Returns the differences from eager mode of a model with collectives in forward."""
    mesh = mesh_of(**{name: dist.get_world_size()})
    makers = {
        "tp": TensorParallel,
        "cp": ContextParallel,
        "ep": lambda mesh, form: Dispatched(mesh),
    }
    model = makers[name](mesh, form)
    loss = model.loss if name == "cp" else F.mse_loss
    torch.manual_seed(1)
    length = parallel_models.LENGTH, parallel_models.WIDTH
    batches: list[Batch] = [
        ((torch.randn(2, *length),), {}, torch.randn(2, *length)) for _ in range(MICROBATCHES)
    ]
    options = ExportOptions(process_groups=groups_of_meshes([mesh]))
    compiled = compile_step(model, *batches[0], loss, ranks_of=[0, 1], exact=True, options=options)
    orders = schedules.build("zb-h1", ranks=2, microbatches=MICROBATCHES).orders
    result = Runner(compiled, model, batches, seed=5).run(orders)
    expected = eager_step(makers[name](mesh, form), batches, loss, seed=5, in_place=True)
    return {
        "differences": differences(result, expected),
        "groups": sorted(compiled.step.process_groups),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("tp", "sequence"), ("cp", "ring"), ("ep", "")),
        *(
            pytest.param(*case, marks=pytest.mark.beyond_sample)
            for case in (("tp", "plain"), ("tp", "functions"), ("cp", "gather"), ("cp", "ulysses"))
        ),
    ],
)
def test_bits_of_collectives_in_the_model(name: str, form: str, pool: Pool) -> None:
    for actual in pool.run(by_hand, name, form, ranks=2):
        assert actual == {"differences": [], "groups": [name]}


class Summed(torch.autograd.Function):
    """Sums over all ranks by a function that was imported by name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        all_reduce(grad)
        return grad


class SumsActivations(nn.Module):
    """Two layers with a sum over ranks in between: in a Function, or where autograd is blind."""

    def __init__(self, in_function: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.in_function = in_function

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.in_function:
            x = Summed.apply(x)
        else:
            all_reduce(x)
        return self.last(x)  # type: ignore[no-any-return]


def by_name(in_function: bool) -> Any:
    """Returns what differs from eager mode, or the refusal."""
    mesh = mesh_of(tp=dist.get_world_size())
    model = SumsActivations(in_function)
    batches = [((torch.randn(4, 8),), {}, torch.randn(4, 8)) for _ in range(MICROBATCHES)]
    options = ExportOptions(process_groups=groups_of_meshes([mesh]))
    try:
        compiled = compile_step(model, *batches[0], F.mse_loss, ranks_of=[0, 1], options=options)
    except CaptureError as error:
        return str(error)
    orders = schedules.build("zb-h1", ranks=2, microbatches=MICROBATCHES).orders
    result = Runner(compiled, model, batches, seed=5).run(orders)
    return differences(result, eager_step(model, batches, F.mse_loss, seed=5))


@pytest.mark.slow
def test_collectives_that_are_imported_by_name(pool: Pool) -> None:
    assert pool.run(by_name, True, ranks=2) == [[], []]
    for refusal in pool.run(by_name, False, ranks=2):
        assert "torch.distributed.all_reduce on an activation" in refusal
        assert "test_dtensor.py:" in refusal
        assert "autograd.Function" in refusal


class SequenceNorm(nn.Module):
    """A norm on a part of the sequence, whose weight gradient is summed over ranks."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](F.relu(self.layers[0](x)) * Enter.apply(self.weight, self.group))


def deferred(exact: bool) -> dict[str, Any]:
    mesh = mesh_of(tp=dist.get_world_size())
    torch.manual_seed(dist.get_rank())
    model, batch = SequenceNorm(mesh.get_group("tp")), ((torch.randn(4, 8),), {}, torch.randn(4, 8))
    options = ExportOptions(process_groups=groups_of_meshes([mesh]))
    compiled = compile_step(
        model, *batch, F.mse_loss, ranks_of=[0, 1], exact=exact, options=options
    )
    collectives = [
        collective_name(node)
        for graph in compiled.passes.values()
        for node in graph.calls
        if is_collective(node)
    ]
    orders = schedules.build("zb-h1", ranks=2, microbatches=2).orders
    result = Runner(compiled, model, [batch, batch], seed=0).run(orders)
    gradient = result.gradients["weight"]
    if not exact:
        dist.all_reduce(gradient)
    (expected,) = torch.autograd.grad(F.mse_loss(model(*batch[0]), batch[2]), model.weight)
    return {
        "collectives": collectives,
        "deferred": compiled.step.deferred_sums,
        "right": torch.allclose(gradient, expected, rtol=1e-6),
    }


@pytest.mark.slow
def test_sums_that_concern_a_weight_alone_run_once_per_step(pool: Pool) -> None:
    for actual in pool.run(deferred, False, ranks=2):
        assert actual == {"collectives": [], "deferred": {"weight": "tp"}, "right": True}
    for actual in pool.run(deferred, True, ranks=2):
        assert actual == {"collectives": ["all_reduce"], "deferred": {}, "right": True}


class Drops(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.up, self.down, self.p = nn.Linear(8, 16), nn.Linear(16, 8), p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.dropout(self.up(x), self.p)), 0.1)


def warned(p: float) -> list[str]:
    mesh = mesh_of(tp=dist.get_world_size())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Drops(p), mesh["tp"], plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export_training_step(
            model, (torch.randn(4, 8),), loss_fn=lambda output, target: output.sum()
        )
    return [str(warning.message) for warning in caught]


@pytest.mark.slow
def test_dropout_on_a_shard_is_said_with_its_line(pool: Pool) -> None:
    for messages in pool.run(warned, 0.1, ranks=2):
        assert len(messages) == 1
        assert "sharded over tp: dropout on a sharded activation repeats its mask" in messages[0]
        assert "test_dtensor.py:" in messages[0]
    assert pool.run(warned, 0.0, ranks=2) == [[], []]


def texts() -> str:
    """Returns the texts of all pass graphs, with their inputs and outputs."""
    plan: dict[str, Any] = {f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {f"blocks.*.mlp.{name}": ColwiseParallel() for name in ("up", "gate")}
    plan |= {"blocks.*.attention.o": RowwiseParallel(), "blocks.*.mlp.down": RowwiseParallel()}
    model = parallelize_module(Llama(2), mesh_of(tp=dist.get_world_size())["tp"], plan)
    torch.manual_seed(1)
    passes = compile_step(model, *text(), loss_of, ranks_of=[0, 1]).passes
    return "\n".join(
        f"{label} {graph.inputs} {graph.outputs}\n{graph_text(graph.module)}"
        for label, graph in passes.items()
    )


RANK = """
import torch, torch.distributed as dist, sys
from tests.passes.test_dtensor import texts
torch.set_num_threads(1)
rank, store = int(sys.argv[1]), "file://" + sys.argv[2]
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
print(texts())
dist.destroy_process_group()
"""


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_equal_graphs_on_ranks_with_different_hash_seeds(tmp_path: Path) -> None:
    """The graphs of a model without vocabulary parallelism, whose embedding has a part per rank."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root), str(root / "examples")))
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(tmp_path / "store")],
            env={**os.environ, "PYTHONHASHSEED": str(rank + 1), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    one, other = (process.communicate(timeout=200)[0] for process in processes)
    assert "0.F" in one
    assert one == other
