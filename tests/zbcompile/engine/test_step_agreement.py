"""Ranks agree on a step by one message, without waiting for it, and a step that differs leaves
nothing behind."""

import contextlib
import threading
import traceback
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.parallel_models import LENGTH, WIDTH, Dispatched, TensorParallel
from tests.support.pool import Pool
from zbcompile.engine.step import Engine

# of torch.distributed, by which a process speaks to others
CALLS = """
all_reduce reduce broadcast all_gather all_gather_into_tensor all_gather_object barrier
reduce_scatter_tensor all_to_all_single gather_object broadcast_object_list scatter_object_list
send recv isend irecv batch_isend_irecv
"""


def called(kind: str) -> tuple[Counter[str], int]:
    """Counts the calls of torch.distributed in two steps that come after one like them: outside of
    the actions by name, and within them how often."""
    options: dict[str, Any] = {"schedule": "zb-h1", "microbatches": 2, "loss": mse_loss}
    mesh = mesh_of(**({"pp": 2} if kind == "pp" else {"pp": 1, kind: 2}))
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
    if kind == "tp":
        model, options["placements"] = TensorParallel(mesh, "plain"), TensorParallel.PLACEMENTS
    if kind == "ep":
        model, options["placements"] = Dispatched(mesh), {"expert": {"ep": "shard"}}
    pipe = zbcompile.pipeline(model, mesh=mesh, **options)
    optimizer = pipe.optimizer(torch.optim.AdamW, overlap=kind == "dp")
    x, outside, within = torch.randn(4, LENGTH, WIDTH), Counter[str](), Counter[str]()

    def counted(name: str, call: Any) -> Any:
        def counting(*arguments: Any, **named: Any) -> Any:
            acts = Engine.run_step.__code__ in {f.f_code for f, _ in traceback.walk_stack(None)}
            begun = threading.current_thread().name.startswith("zbcompile-collectives")
            (within if acts or begun else outside)[name] += 1
            return call(*arguments, **named)

        return mock.patch.object(dist, name, counting)

    for step in range(3):
        with contextlib.ExitStack() as stack:
            for name in CALLS.split() if step else ():
                stack.enter_context(counted(name, getattr(dist, name)))
            pipe.step(x, target=x)
        if kind != "dp":
            optimizer.step()
            optimizer.zero_grad()
    return outside, within.total()


@pytest.mark.mostly_slow(every=4)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "messages"), [("dp", 2), ("pp", 0), ("tp", 0), ("ep", 2)])
def test_torch_is_called_once_before_a_step_runs(kind: str, messages: int, pool: Pool) -> None:
    """Only if ranks have separate losses; else only for losses and sums."""
    for outside, within in pool.run(called, kind, ranks=2):
        assert outside == Counter({"all_reduce": messages} if messages else {})
        assert within


def step(pipe: zbcompile.Pipeline, count: int) -> float:
    parts = [torch.full((2, 2), float(number)) for number in range(count)]
    return float(pipe.step(microbatches=[((part,), {}, part) for part in parts]))


def differs_once(overlap: bool) -> None:
    """One step in which replicas have other numbers of microbatches, between others."""
    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), mesh_of(dp=2, pp=1)
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": 2, "loss": mse_loss}
    pipe = zbcompile.pipeline(model, mesh=mesh, **options)
    pipe.compile(torch.zeros(4, 2), target=torch.zeros(4, 2))
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, overlap=overlap)
    first = step(pipe, 2)
    if not overlap:
        optimizer.step()
        optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    said = r"rank 0 runs 2 microbatches with(.|\n)*rank 1 runs 4 microbatches with"
    with pytest.raises(zbcompile.PipelineError, match=said):
        step(pipe, (2, 4)[pipe.ranks.mesh.index("dp")])
    assert all(map(torch.equal, before, pipe.parameters()))
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert step(pipe, 2) < first
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.beyond_sample)])
def test_a_step_that_differs_between_replicas_changes_nothing(overlap: bool, pool: Pool) -> None:
    """The step has run when the difference is found: nothing was summed over replicas, no parameter
    updated, and the next step runs."""
    pool.run(differs_once, overlap, ranks=2)
