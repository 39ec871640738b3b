"""Training with two replicas of a pipeline of two ranks, whose optimizer is divided among them, or is not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import zbcompile
from tests.support.oracle import PROBLEMS, Batch
from tests.support.replicated import MICROBATCHES, REPLICAS, ROWS, mesh_of_replicas
from tests.support.training import compiled_once


@dataclass(frozen=True)
class Training:
    """`updates` times: `unsynchronised` steps inside no_sync, `synchronised` ones after them, and an update.
    `scale` is the first one of a GradScaler."""

    problem: str = "small-tied"
    schedule: str = "zb-h1"
    kind: str = "AdamW"
    clip: float | None = None
    dtype: str = "float32"
    unsynchronised: int = 0
    synchronised: int = 1
    scale: float | None = None
    updates: int = 3
    vocab: Any = "off"

    def __str__(self) -> str:
        usual = vars(Training())
        return " ".join(str(value) for key, value in vars(self).items() if key == "schedule" or value != usual[key])


@dataclass(frozen=True)
class Result:
    """The losses of all steps, the norms of all updates, the whole state dict, the bytes of this rank's optimizer
    state, and how many parameters have a gradient after each step outside no_sync."""

    losses: list[Tensor]
    norms: list[Tensor]
    state: Mapping[str, Tensor]
    held: int
    gradients: list[int]


def at_levels(training: Training, levels: tuple[int, ...] = (0, 1, 2)) -> list[Result]:
    """The same training with each `zero`, on this rank."""
    torch.set_num_threads(1)
    mesh = mesh_of_replicas()
    if training.vocab != "off":  # whose collectives stand in the schedule of each program
        return [trained(training, zero, mesh) for zero in levels]
    with compiled_once(f"{training.problem} {training.dtype}", exact=True):
        return [trained(training, zero, mesh) for zero in levels]


def trained(training: Training, zero: int, mesh: DeviceMesh) -> Result:
    pipe, optimizer = pipeline_with(training, zero, mesh)
    scaler = None
    if training.scale is not None:
        scaler = zbcompile.GradScaler(pipe, init_scale=training.scale, growth_interval=2)
    found = Result([], [], {}, 0, [])
    steps = training.unsynchronised + training.synchronised
    for step, batch in enumerate(batches(training, training.updates * steps)):
        own = list(batch.parts(REPLICAS))[mesh["dp"].get_local_rank()]
        own = own if training.problem == "small-tied" else in_dtype(own, training.dtype)
        if step % steps < training.unsynchronised:
            with pipe.no_sync():
                found.losses.append(pipe.step(*own.args, target=own.target))
            continue
        found.losses.append(pipe.step(*own.args, target=own.target))
        mine = [p for p in pipe.parameters() if p.ndim == 2 or training.kind != "Muon"]
        found.gradients.append(sum(p.grad is not None for p in mine))
        if step % steps == steps - 1:
            update(optimizer, scaler)
            found.norms.append(torch.zeros(()) if optimizer.norm is None else optimizer.norm)
    found = Result(found.losses, found.norms, pipe.state_dict(full=True), bytes_of(optimizer), found.gradients)
    pipe.close()
    return found


def pipeline_with(training: Training, zero: int, mesh: DeviceMesh | None) -> tuple[zbcompile.Pipeline, Any]:
    chosen = PROBLEMS[training.problem]
    model = chosen.model().to(getattr(torch, training.dtype))
    options = {"schedule": training.schedule, "microbatches": MICROBATCHES, "vocab": training.vocab}
    pipe = zbcompile.pipeline(model, loss=chosen.loss, mesh=mesh, exact=training.vocab == "off", **options)
    kind, matrices = getattr(torch.optim, training.kind), {"params": lambda _, p: p.ndim == 2}
    groups = [{"params": lambda _, p: p.ndim < 2, "weight_decay": 0.0}]
    more: dict[str, Any] = matrices if training.kind == "Muon" else {"groups": groups}
    return pipe, pipe.optimizer(kind, lr=1e-2, zero=zero, clip=training.clip, **more)


def in_dtype(batch: Batch, dtype: str) -> Batch:
    wanted = getattr(torch, dtype)
    return Batch(tuple(x.to(wanted) for x in batch.args), {}, batch.target.to(wanted))


def batches(training: Training, count: int) -> Any:
    return PROBLEMS[training.problem].batches(count, REPLICAS * MICROBATCHES * ROWS)


def update(optimizer: Any, scaler: Any) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """The state that is as large as what it belongs to."""
    return sum(t.nbytes for kept in optimizer.state.values() for t in kept.values() if t.dim())
