"""Collectives in a model: pass graphs have the bits of eager mode. Models of other kinds:
`test_mesh.py`, `test_dtensor.py` and `test_experts_on_ranks.py` of tests/zbcompile/engine."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.meshes import group_without_peers, mesh_of
from tests.support.parallel_models import LENGTH, WIDTH, ContextParallel, Enter
from tests.support.pass_graph_runner import Runner, compile_step, differences, eager_step
from tests.support.pool import Pool
from zbcompile import schedules
from zbcompile.passes.capture.export import ExportOptions, export_training_step
from zbcompile.passes.graph.process_groups import collective_name, groups_of_meshes, is_collective

ORDERS = schedules.build("zb-h1", ranks=2, microbatches=2).orders


def compared(name: str, model: Any, eager: Any, shape: tuple[int, ...], **options: Any) -> Any:
    """The compiled step of a model on a mesh, and what differs from eager mode."""
    mesh = mesh_of(**{name: dist.get_world_size()})
    model, eager = model(mesh), eager(mesh)
    loss = model.loss if hasattr(model, "loss") else F.mse_loss
    torch.manual_seed(1)
    batches = [((torch.randn(shape),), {}, torch.randn(shape)) for _ in range(2)]
    groups = ExportOptions(process_groups=groups_of_meshes([mesh]))
    more = {"ranks_of": [0, 1], "options": groups, **options}
    compiled = compile_step(model, *batches[0], loss, **more)
    result = Runner(compiled, model, batches, seed=5).run(ORDERS)
    return compiled, differences(result, eager_step(eager, batches, loss, seed=5, in_place=True))


def context_parallel() -> Any:
    form = lambda mesh: ContextParallel(mesh, "ring")  # noqa: E731
    compiled, wrong = compared("cp", form, form, (2, LENGTH, WIDTH), exact=True)
    return wrong, list(compiled.step.process_groups)


class Drops(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.up, self.down, self.p = nn.Linear(8, 16), nn.Linear(16, 8), p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.dropout(self.up(x), self.p)), 0.1)


@pytest.mark.filterwarnings("error")
def test_dropout_on_a_shard_is_said_with_its_line() -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    said = r"test_dtensor\.py:.* sharded over tp: dropout on a sharded activation repeats its mask"
    with group_without_peers(2):
        for p, seen in ((0.1, pytest.warns(UserWarning, match=said)), (0.0, nullcontext())):
            model = parallelize_module(Drops(p), mesh_of(tp=2)["tp"], plan)
            with seen:
                export_training_step(model, (torch.randn(4, 8),), loss_fn=lambda y, _: y.sum())


class SequenceNorm(nn.Module):
    """A norm on a part of the sequence, whose weight gradient is summed over ranks."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.weight = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.group = mesh.get_group("tp")

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](F.relu(self.layers[0](x)) * Enter.apply(self.weight, self.group))


def deferred(exact: bool) -> Any:
    """Collectives, deferred sums, and what differs from eager mode."""
    compiled, wrong = compared("tp", SequenceNorm, SequenceNorm, (4, 8), exact=exact)
    nodes = [node for graph in compiled.passes.values() for node in graph.calls]
    return [*map(collective_name, filter(is_collective, nodes))], compiled.step.deferred_sums, wrong


def on_a_rank() -> Any:
    return context_parallel(), deferred(False), deferred(True)


@pytest.mark.slow
def test_collectives_in_the_model(pool: Pool) -> None:
    """Sums that concern a weight alone are left to the end of the step, where they are no part of the
    passes: the gradient is a share."""
    for bits, late, exact in pool.run(on_a_rank, ranks=2):
        assert bits == ([], ["cp"])
        assert late == ([], {"weight": "tp"}, ["gradients: weight"])
        assert exact == (["all_reduce"], {}, [])
