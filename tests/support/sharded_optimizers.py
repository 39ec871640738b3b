"""Training with two replicas of a pipeline, whose optimizer is divided among them, or is not."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import zbcompile
from tests.support.optimizers import OPTIMIZERS
from tests.support.oracle import PROBLEMS, Batch
from tests.support.replicated import MICROBATCHES, REPLICAS, ROWS, mesh_of_replicas
from tests.support.training import compiled_once


@dataclass(frozen=True)
class Training:
    """`updates` times: `unsynchronised` steps inside no_sync, one after them, and an update."""

    problem: str = "small-tied"
    schedule: str = "zb-h1"
    kind: str = "AdamW"
    clip: float | None = None
    dtype: str = "float32"
    unsynchronised: int = 0
    updates: int = 3
    vocab: Any = "off"
    overlap: bool = False
    validate: str = "before"

    def __str__(self) -> str:
        usual = vars(Training())
        return " ".join(f"{v}" for k, v in vars(self).items() if k == "schedule" or v != usual[k])


@dataclass
class Result:
    """The losses of all steps, the norms of all updates, the whole state dict, the bytes of this
    rank's optimizer state, and how many parameters have a gradient after each step outside
    no_sync."""

    losses: list[Tensor]
    norms: list[Tensor]
    gradients: list[int]
    state: Mapping[str, Tensor]
    held: int = 0


def at_levels(training: Training, levels: tuple[int, ...] = (0, 1)) -> list[Result]:
    """The same training with each `zero`, on this rank; before them, of one that updates early, one
    that does not."""
    torch.set_num_threads(1)
    mesh, late = mesh_of_replicas(), replace(training, overlap=False, validate="before")
    before = [(late, 0)] if training != late else []
    cases = [*before, *((training, zero) for zero in levels)]
    if training.vocab != "off":  # whose collectives stand in the schedule of each program
        return [trained(case, zero, mesh) for case, zero in cases]
    with compiled_once(f"{training.problem} {training.dtype}", exact=True):
        return [trained(case, zero, mesh) for case, zero in cases]


def trained(training: Training, zero: int, mesh: DeviceMesh) -> Result:
    pipe, optimizer = pipeline_with(training, zero, mesh)
    result, steps = Result([], [], [], {}), training.unsynchronised + 1
    for step, plain in enumerate(batches(training, training.updates * steps, mesh)):
        if step % steps < training.unsynchronised:
            with pipe.no_sync():
                result.losses.append(pipe.step(*plain.args, target=plain.target))
            continue
        result.losses.append(pipe.step(*plain.args, target=plain.target))
        local = [p for p in pipe.parameters() if p.ndim == 2 or training.kind != "Muon"]
        result.gradients.append(sum(p.grad is not None for p in local))
        optimizer.step()
        optimizer.zero_grad()
        result.norms.append(torch.zeros(()) if optimizer.norm is None else optimizer.norm)
    # the state that is as large as what it belongs to
    saved = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    result.state, result.held = pipe.state_dict(full=True), sum(t.nbytes for t in saved)
    pipe.close()
    return result


def pipeline_with(
    training: Training, zero: int, mesh: DeviceMesh | None
) -> tuple[zbcompile.Pipeline, Any]:
    chosen = PROBLEMS[training.problem]
    options = {"schedule": training.schedule, "microbatches": MICROBATCHES, "vocab": training.vocab}
    model = chosen.model().to(getattr(torch, training.dtype))
    exact = training.vocab == "off"
    pipe = zbcompile.pipeline(model, loss=chosen.loss, mesh=mesh, exact=exact, **options)
    (kind, more), matrices = OPTIMIZERS[training.kind], {"params": lambda _, p: p.ndim == 2}
    groups = [{"params": lambda _, p: p.ndim < 2, "weight_decay": 0.0}]
    more = {**more, **(matrices if training.kind == "Muon" else {"groups": groups})}
    more |= {name: getattr(training, name) for name in ("clip", "overlap", "validate")}
    return pipe, pipe.optimizer(kind, lr=1e-2, zero=zero, **more)


def batches(training: Training, count: int, mesh: DeviceMesh | None = None) -> list[Batch]:
    """This replica's batches; the first one's without a mesh."""
    result, dtype = [], getattr(torch, training.dtype)
    for batch in PROBLEMS[training.problem].batches(count, REPLICAS * MICROBATCHES * ROWS):
        part = list(batch.parts(REPLICAS))[mesh["dp"].get_local_rank() if mesh else 0]
        both = [x.to(dtype) if x.is_floating_point() else x for x in (*part.args, part.target)]
        result.append(Batch((both[0],), {}, both[1]))
    return result
