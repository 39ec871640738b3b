"""Training with two replicas of a pipeline of two ranks, and what it must equal."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zbcompile
from tests.support.oracle import PROBLEMS, Batch, microbatch_loss
from tests.support.training import gradients_of

MICROBATCHES, ROWS, REPLICAS = 4, 2, 2
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
    return init_device_mesh(
        torch.get_default_device().type,
        (REPLICAS, dist.get_world_size() // REPLICAS),
        mesh_dim_names=("dp", "pp"),
    )


def replicated(problem: str, schedule: str, reduction: str, unsynchronised: int) -> Run:
    """`unsynchronised` steps inside no_sync and two steps after it, all into the same `.grad`."""
    mesh = mesh_of_replicas()
    chosen = PROBLEMS[problem]
    model = chosen.model()
    if mesh["dp"].get_local_rank() == 1:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)  # the first replica's values count
    options = {
        "schedule": schedule,
        "microbatches": MICROBATCHES,
        "exact": True,
        "loss_reduction": reduction,
    }
    pipe = zbcompile.pipeline(model, loss=chosen.loss, mesh=mesh, **options)
    losses = []
    for step, batch in enumerate(
        chosen.batches(unsynchronised + 2, REPLICAS * MICROBATCHES * ROWS)
    ):
        local = list(batch.parts(REPLICAS))[mesh["dp"].get_local_rank()]
        if step < unsynchronised:
            with pipe.no_sync():
                losses.append(pipe.step(*local.args, target=local.target))
        else:
            losses.append(pipe.step(*local.args, target=local.target))
    gradients = gradients_of(pipe)
    norm = pipe.clip_grad_norm_(0.5)
    return Run(losses, gradients, norm, gradients_of(pipe))


def replicated_in_half_precision() -> Gradients:
    """One step of a bfloat16 model on the replicas' halves of a batch."""
    mesh, chosen = mesh_of_replicas(), PROBLEMS["mlp"]
    model = chosen.model().bfloat16()
    pipe = zbcompile.pipeline(
        model, schedule="zb-h1", microbatches=MICROBATCHES, loss=chosen.loss, mesh=mesh
    )
    local = halves()[mesh["dp"].get_local_rank()]
    pipe.step(*local.args, target=local.target)
    return gradients_of(pipe)


def halves() -> list[Batch]:
    batch = PROBLEMS["mlp"].batches(1, REPLICAS * MICROBATCHES * ROWS)[0]
    return [
        Batch((part.args[0].bfloat16(),), {}, part.target.bfloat16())
        for part in batch.parts(REPLICAS)
    ]


def summed_in_single_precision() -> dict[str, Tensor]:
    """Eager's bfloat16 gradients of all microbatches, summed in float32 and rounded once."""
    model, loss = PROBLEMS["mlp"].model().bfloat16(), PROBLEMS["mlp"].loss
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for half in halves():
        for part in half.parts(MICROBATCHES):
            model.zero_grad()
            (loss(model(*part.args), part.target) / (REPLICAS * MICROBATCHES)).backward()
            for name, parameter in model.named_parameters():
                sums[name] += parameter.grad
    return {name: total.bfloat16() for name, total in sums.items()}


def in_one_process(problem: str, reduction: str, steps: int) -> Run:
    """Eager gradient accumulation over the whole batches, one replica's microbatches after the
    other's."""
    chosen = PROBLEMS[problem]
    model = chosen.model()
    losses = [
        _accumulate(model, problem, batch, reduction, step)
        for step, batch in enumerate(chosen.batches(steps, REPLICAS * MICROBATCHES * ROWS))
    ]
    gradients = gradients_of(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return Run(losses, gradients, norm, gradients_of(model))


def _accumulate(model: nn.Module, problem: str, batch: Batch, reduction: str, step: int) -> Tensor:
    count = REPLICAS * MICROBATCHES
    total = torch.zeros(())
    for i, part in enumerate(batch.parts(count)):
        torch.manual_seed(zbcompile.microbatch_seed(step, i))
        loss = microbatch_loss(model, PROBLEMS[problem].loss, part) / (
            count if reduction == "mean" else 1
        )
        loss.backward()
        total = total + loss.detach()
    return total
