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
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, mse_loss

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.parallel_models import LENGTH, WIDTH, ContextParallel, Dispatched, TensorParallel
from tests.support.pool import Pool
from zbcompile import PipelineError
from zbcompile.engine.step import Engine


def made(shape: tuple[int, int]) -> zbcompile.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    arguments = {"schedule": "1f1b", "microbatches": 2, "loss": mse_loss, "timeout": 60}
    pipe = zbcompile.pipeline(model, mesh=mesh, **arguments)
    return pipe.compile(torch.zeros(4, 2), target=torch.zeros(4, 2))


def step(pipe: zbcompile.Pipeline, count: int) -> float:
    parts = [torch.full((2, 2), float(number)) for number in range(count)]
    return float(pipe.step(microbatches=[((part,), {}, part) for part in parts]))


CALLS = (  # of torch.distributed, by which a process speaks to others
    *(
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "barrier",
    ),
    *(
        "reduce_scatter_tensor",
        "all_to_all_single",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
    ),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
)


def words(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), target.argmax(-1).flatten())


def called(kind: str) -> tuple[Counter[str], int]:
    """Counts the calls of torch.distributed in four steps that come after one like them:
    outside of the actions by name, and within them how often."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"schedule": "zb-h1", "microbatches": 2, "loss": mse_loss}
    along = (
        "pp" if kind == "vocab" else "dp" if kind.startswith("zero") or kind == "overlap" else kind
    )
    mesh = mesh_of(**{"pp": 1, along: 2})
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
    if kind == "tp":
        model, options["placements"] = TensorParallel(mesh, "plain"), TensorParallel.PLACEMENTS
    if kind == "cp":
        model = ContextParallel(mesh, "gather")
        options["loss"] = model.loss
    if kind == "ep":
        model, options["placements"] = Dispatched(mesh), {"expert": {"ep": "shard"}}
    if kind == "vocab":
        options |= {"vocab": 1, "loss": words}
    pipe = zbcompile.pipeline(model, mesh=mesh, **options)
    owns: dict[str, Any] = {"zero": int(kind[-1])} if kind.startswith("zero") else {}
    optimizer = pipe.optimizer(torch.optim.AdamW, **(owns or {"overlap": kind == "overlap"}))
    x = torch.randn(4, LENGTH, WIDTH)
    outside, within = Counter[str](), Counter[str]()

    def counted(name: str, call: Any) -> Any:
        def counting(*arguments: Any, **named: Any) -> Any:
            codes = {frame.f_code for frame, _ in traceback.walk_stack(None)}
            acts = Engine.run_step.__code__ in codes
            acts = acts or threading.current_thread().name.startswith(
                "zbcompile-collectives"
            )  # begun by actions
            (within if acts else outside)[name] += 1
            return call(*arguments, **named)

        return counting

    for step in range(5):
        with contextlib.ExitStack() as stack:
            for name in CALLS if step else ():
                stack.enter_context(
                    mock.patch.object(dist, name, counted(name, getattr(dist, name)))
                )
            pipe.step(x, target=x)
        if kind != "overlap":
            optimizer.step()
            optimizer.zero_grad()
    return outside, within.total()


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        *(("pp", 0), ("vocab", 0), ("tp", 0), ("cp", 1), ("ep", 1), ("overlap", 1)),
        *((f"zero {level}", 1) for level in range(2)),
    ],
)
def test_torch_is_called_once_before_a_step_runs(kind: str, messages: int, pool: Pool) -> None:
    """Only if ranks have separate losses; else only for losses and sums."""
    for outside, within in pool.run(called, kind, ranks=2):
        assert outside == Counter({"all_reduce": 4 * messages} if messages else {})
        assert within


def differs_once(overlap: bool) -> tuple[list[str], bool, list[float]]:
    """One step in which replicas have other numbers of microbatches, between others."""
    pipe = made((2, 2))
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, overlap=overlap)
    said, losses = [], []
    for counts in ((2, 2), (2, 4), (2, 2)):
        before = [parameter.detach().clone() for parameter in pipe.parameters()]
        try:
            losses.append(step(pipe, counts[pipe.ranks.mesh.index("dp")]))
        except PipelineError as error:
            said.append(str(error))
            saved = all(map(torch.equal, before, pipe.parameters()))
            saved = saved and all(parameter.grad is None for parameter in pipe.parameters())
            continue
        if not overlap:
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    return said, saved, losses


@pytest.mark.slow
def test_a_step_that_differs_between_replicas_changes_nothing(pool: Pool) -> None:
    """The step has run when the difference is found: nothing was summed over replicas, no parameter updated, and
    the next step runs."""
    for overlap in (False, True):
        for said, saved, losses in pool.run(differs_once, overlap, ranks=4):
            assert saved
            first, last = losses
            assert last < first
            (text,) = said
            assert text.startswith("rank 0 runs 2 microbatches with")
            assert "rank 2 runs 4 microbatches with" in text
