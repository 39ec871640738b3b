"""Training with two replicas of a pipeline of two ranks, and what it must equal."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zbcompile
from tests.support.oracle import PROBLEMS, Batch, eager_step
from tests.support.training import compiled_once, gradients_of

MICROBATCHES, ROWS, REPLICAS = 4, 2, 2
ALL = REPLICAS * MICROBATCHES
Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Run:
    """What one rank saw: losses, gradients after the last step, the norm of all of them, and the
    clipped ones."""

    losses: list[Tensor]
    gradients: Gradients
    norm: Tensor
    clipped: Gradients


def mesh_of_replicas() -> DeviceMesh:
    shape = (REPLICAS, dist.get_world_size() // REPLICAS)
    device = torch.get_default_device().type
    return init_device_mesh(device, shape, mesh_dim_names=("dp", "pp"))


def replicated(problem: str, schedule: str, reduction: str, unsynchronised: int) -> Run:
    """`unsynchronised` steps inside no_sync and two steps after it, all into the same `.grad`."""
    mesh, chosen = mesh_of_replicas(), PROBLEMS[problem]
    model, replica, losses = chosen.model(), mesh["dp"].get_local_rank(), []
    for parameter in model.parameters() if replica else ():
        nn.init.zeros_(parameter)  # the first replica's values count
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "exact": True, "mesh": mesh}
    options |= {"schedule": schedule, "loss_reduction": reduction}
    pipe = zbcompile.pipeline(model, loss=chosen.loss, **options)
    for step, batch in enumerate(chosen.batches(unsynchronised + 2, ALL * ROWS)):
        local = list(batch.parts(REPLICAS))[replica]
        inside = pipe.no_sync() if step < unsynchronised else nullcontext()
        with inside, compiled_once(problem, exact=True):
            losses.append(pipe.step(*local.args, target=local.target))
    gradients = gradients_of(pipe)
    return Run(losses, gradients, pipe.clip_grad_norm_(0.5), gradients_of(pipe))


def in_one_process(problem: str, reduction: str, steps: int) -> Run:
    """Eager gradient accumulation over the whole batches, one replica's microbatches after the
    other's."""
    chosen = PROBLEMS[problem]
    model, factor = chosen.model(), ALL if reduction == "sum" else 1  # a power of two
    loss = lambda output, target: chosen.loss(output, target) * factor  # type: ignore[misc]  # noqa: E731
    batches = enumerate(chosen.batches(steps, ALL * ROWS))
    losses = [eager_step(model, loss, batch, ALL, step) for step, batch in batches]
    gradients = gradients_of(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return Run(losses, gradients, norm, gradients_of(model))


def replicated_in_half_precision() -> Gradients:
    """One step of a bfloat16 model on the replicas' halves of a batch."""
    mesh, chosen = mesh_of_replicas(), PROBLEMS["mlp"]
    options: dict[str, Any] = {"schedule": "zb-h1", "microbatches": MICROBATCHES, "mesh": mesh}
    pipe = zbcompile.pipeline(chosen.model().bfloat16(), loss=chosen.loss, **options)
    local = halves()[mesh["dp"].get_local_rank()]
    pipe.step(*local.args, target=local.target)
    return gradients_of(pipe)


def halves() -> list[Batch]:
    parts = PROBLEMS["mlp"].batches(1, ALL * ROWS)[0].parts(REPLICAS)
    return [Batch((p.args[0].bfloat16(),), {}, p.target.bfloat16()) for p in parts]  # type: ignore[union-attr]


def summed_in_single_precision() -> dict[str, Tensor]:
    """Eager's bfloat16 gradients of all microbatches, summed in float32 and rounded once."""
    model, loss = PROBLEMS["mlp"].model().bfloat16(), PROBLEMS["mlp"].loss
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for part in [part for half in halves() for part in half.parts(MICROBATCHES)]:
        model.zero_grad()
        (loss(model(*part.args), part.target) / ALL).backward()  # type: ignore[misc]
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad
    return {name: total.bfloat16() for name, total in sums.items()}
