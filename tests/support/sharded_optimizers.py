"""Training with two replicas of a pipeline, whose optimizer is divided among them, or
is not."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zbcompile
from tests.support.optimizers import OPTIMIZERS
from tests.support.oracle import PROBLEMS, Batch
from tests.support.replicated import MICROBATCHES, REPLICAS, ROWS, mesh_of_replicas
from tests.support.training import compiled_once


@dataclass(frozen=True)
class Training:
    """`updates` times: `unsynchronised` steps inside no_sync, `synchronised` ones after them, and
    an update."""

    problem: str = "small-tied"
    schedule: str = "zb-h1"
    kind: str = "AdamW"
    clip: float | None = None
    dtype: str = "float32"
    unsynchronised: int = 0
    synchronised: int = 1
    updates: int = 3
    vocab: Any = "off"
    overlap: bool = False
    validate: str = "before"

    def __str__(self) -> str:
        usual = vars(Training())
        return " ".join(
            str(value)
            for key, value in vars(self).items()
            if key == "schedule" or value != usual[key]
        )


@dataclass(frozen=True)
class Result:
    """The losses of all steps, the norms of all updates, the whole state dict, the bytes of this
    rank's optimizer state, and how many parameters have a gradient after each step outside no_sync.
    """

    losses: list[Tensor]
    norms: list[Tensor]
    state: Mapping[str, Tensor]
    held: int
    gradients: list[int]


def at_levels(training: Training, levels: tuple[int, ...] = (0, 1)) -> list[Result]:
    """The same training with each `zero`, on this rank; of one that overlaps, before them one that
    does not."""
    torch.set_num_threads(1)
    mesh = mesh_of_replicas()
    if training.vocab != "off":  # whose collectives stand in the schedule of each program
        return [trained(training, zero, mesh) for zero in levels]
    with compiled_once(f"{training.problem} {training.dtype}", exact=True):
        late = [trained(replace(training, overlap=False), 0, mesh)] if training.overlap else []
        return [*late, *(trained(training, zero, mesh) for zero in levels)]


def trained(training: Training, zero: int, mesh: DeviceMesh) -> Result:
    pipe, optimizer = pipeline_with(training, zero, mesh)
    result = Result([], [], {}, 0, [])
    steps = training.unsynchronised + training.synchronised
    for step, batch in enumerate(batches(training, training.updates * steps)):
        plain = list(batch.parts(REPLICAS))[mesh["dp"].get_local_rank()]
        plain = in_dtype(plain, training.dtype)
        if step % steps < training.unsynchronised:
            with pipe.no_sync():
                result.losses.append(pipe.step(*plain.args, target=plain.target))
            continue
        result.losses.append(pipe.step(*plain.args, target=plain.target))
        local = [p for p in pipe.parameters() if p.ndim == 2 or training.kind != "Muon"]
        result.gradients.append(sum(p.grad is not None for p in local))
        if step % steps == steps - 1:
            optimizer.step()
            optimizer.zero_grad()
            result.norms.append(torch.zeros(()) if optimizer.norm is None else optimizer.norm)
    result = Result(
        result.losses,
        result.norms,
        pipe.state_dict(full=True),
        bytes_of(optimizer),
        result.gradients,
    )
    pipe.close()
    return result


def pipeline_with(
    training: Training, zero: int, mesh: DeviceMesh | None
) -> tuple[zbcompile.Pipeline, Any]:
    chosen = PROBLEMS[training.problem]
    model = chosen.model().to(getattr(torch, training.dtype))
    options = {"schedule": training.schedule, "microbatches": MICROBATCHES, "vocab": training.vocab}
    pipe = zbcompile.pipeline(
        model, loss=chosen.loss, mesh=mesh, exact=training.vocab == "off", **options
    )
    (kind, more), matrices = OPTIMIZERS[training.kind], {"params": lambda _, p: p.ndim == 2}
    groups = [{"params": lambda _, p: p.ndim < 2, "weight_decay": 0.0}]
    more = {**more, **(matrices if training.kind == "Muon" else {"groups": groups})}
    return pipe, pipe.optimizer(
        kind,
        lr=1e-2,
        zero=zero,
        clip=training.clip,
        overlap=training.overlap,
        validate=training.validate,
        **more,
    )


def in_dtype(batch: Batch, dtype: str) -> Batch:
    expected = getattr(torch, dtype)
    args = (x.to(expected) if x.is_floating_point() else x for x in (*batch.args, batch.target))
    return Batch((next(args),), {}, next(args))


def batches(training: Training, count: int) -> Any:
    return PROBLEMS[training.problem].batches(count, REPLICAS * MICROBATCHES * ROWS)


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """The state that is as large as what it belongs to."""
    return sum(t.nbytes for saved in optimizer.state.values() for t in saved.values() if t.dim())


def saved_and_moved(
    training: Training, folder: str, moves: tuple[tuple[str, int, int], ...]
) -> None:
    """Train with zero=0 and with zero=1, and save; then let pipelines of other schedules, levels
    and numbers of replicas load the newest checkpoint, and save it again."""
    torch.set_num_threads(1)
    mesh = mesh_of_replicas()
    for zero in (0, 1):
        pipe, optimizer = pipeline_with(training, zero, mesh)
        for batch in batches(training, training.updates):
            local = in_dtype(
                list(batch.parts(REPLICAS))[mesh["dp"].get_local_rank()], training.dtype
            )
            pipe.step(*local.args, target=local.target)
            optimizer.step()
            optimizer.zero_grad()
        zbcompile.save_checkpoint(f"{folder}/{zero}", pipe, optimizer)
        pipe.close()
    for number, (schedule, zero, replicas) in enumerate(moves, 1):
        mesh = init_device_mesh(
            torch.get_default_device().type,
            (replicas, dist.get_world_size() // replicas),
            mesh_dim_names=("dp", "pp"),
        )
        pipe, optimizer = pipeline_with(replace(training, schedule=schedule), zero, mesh)
        batch = in_dtype(next(iter(batches(training, 1)[0].parts(REPLICAS))), training.dtype)
        pipe.compile(*batch.args, target=batch.target)
        zbcompile.load_checkpoint(f"{folder}/{number}", pipe, optimizer)
        zbcompile.save_checkpoint(f"{folder}/{number + 1}", pipe, optimizer)
        pipe.close()
