"""The pipeline of a run: loaded from a directory, or compiled from a TARGET for the ranks that are there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zbcompile.api.pipeline import Pipeline
from zbcompile.api.pipeline_function import build_pipeline
from zbcompile.batches.example import Example
from zbcompile.cli.target import load_example, load_object
from zbcompile.distributed.process_group import FindDevice, device_of, own_device, start_group
from zbcompile.errors import PipelineError
from zbcompile.model.materialize import fill
from zbcompile.model.seeds import seed_everything
from zbcompile.options import PipelineOptions
from zbcompile.passes.meta_device import is_on_meta
from zbcompile.persistence.loaded_pipeline import device_for, load
from zbcompile.torch_private import pytree


@dataclass(frozen=True)
class Job:
    """The arguments of a run; `python -m zbcompile.run --help` explains every field."""

    directory: Path
    data: str
    steps: int
    optimizer: str
    options: Mapping[str, Any]
    warmup: int = 0
    decay: str = "none"
    clip: float | None = None
    zero: int = 0
    early: bool = False
    validate: str = "before"
    weights: Path | None = None
    init: str | None = None
    checkpoint: Path | None = None
    every: int = 100
    keep: int = 3
    save_async: bool = False
    resume: bool = False
    export: Path | None = None
    seed: int | None = None
    replicas: int = 1
    tensor: int = 1
    threads: int | None = None
    operators: tuple[str, ...] = ()
    backend: str | None = None
    timeout: float = PipelineOptions.timeout
    log_every: int = 10
    debug_nan: bool = PipelineOptions.debug_nan
    compiling: Mapping[str, Any] = field(default_factory=dict)  # options of zbcompile.pipeline, for a TARGET

    @property
    def update(self) -> dict[str, Any]:
        """The options that only `pipe.optimizer` has; empty if a plain torch optimizer is enough."""
        asked = {"zero": self.zero, "early": self.early, "validate": self.validate}
        return asked if asked != {"zero": 0, "early": False, "validate": "before"} else {}

    @property
    def is_target(self) -> bool:
        """Whether `directory` is none, but names a function that builds the model."""
        return ":" in self.directory.name and not self.directory.exists()


def open_pipeline(job: Job) -> Pipeline:
    """The pipeline that a job trains, on this process's ranks. Raises PipelineError, CompileError or ScheduleError."""
    asked: dict[str, Any] = {"timeout": job.timeout, "debug_nan": job.debug_nan}
    asked["init"] = load_object(job.init) if job.init else None
    if job.backend is not None:
        asked["backend"] = load_object(job.backend) if ":" in job.backend else job.backend
    if job.seed is not None:
        asked["seed"] = job.seed
    if job.is_target:
        pipe = _compile(job, asked)
    else:
        mesh = _mesh(job, lambda: device_for(job.directory))
        pipe = load(job.directory, mesh=mesh, operators=job.operators, **asked)
    _require_shared(job, pipe)
    return pipe


def _require_shared(job: Job, pipe: Pipeline) -> None:
    """Raise PipelineError if ranks that should share matrices would all compute the same values."""
    placements = (pipe.options.placements or {}).values()
    if job.tensor > 1 and not any("tp" in placement for placement in placements):
        raise PipelineError(
            f"--tensor {job.tensor}: no parameter of {job.directory} is divided along tp, so these ranks would all "
            "compute the same. Pass a TARGET that parallelises its model over `mesh`, or leave --tensor out."
        )


def _compile(job: Job, asked: dict[str, Any]) -> Pipeline:
    """Every rank builds the model with the same random numbers, and compiles its part."""
    seed_everything(asked.get("seed", 0))
    mesh, microbatches = None, job.compiling["microbatches"]
    if job.tensor > 1:
        mesh = _mesh(job, own_device)
    example = load_example(str(job.directory), mesh)
    mesh = mesh or _mesh(job, lambda: device_of(example.model))
    asked |= {"loss": example.loss, "mesh": mesh, "example": _batch(example, microbatches)}
    if asked["init"] is not None and not is_on_meta(example.model):
        init, model = asked.pop("init"), example.model
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            fill(init, asked.get("seed", 0), name, tensor)
    return build_pipeline(PipelineOptions(**job.compiling, **asked), example.model)


def _batch(example: Example, microbatches: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch made of the example's microbatch that many times."""
    kwargs = dict(example.kwargs) | ({} if example.target is None else {"target": example.target})
    tensors = [leaf for leaf in pytree.tree_leaves((example.args, kwargs)) if isinstance(leaf, torch.Tensor)]
    rows = tensors[0].shape[0] if tensors and tensors[0].dim() else 0

    def repeated(leaf: Any) -> Any:
        split = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows
        return torch.cat([leaf] * microbatches) if split else leaf

    return pytree.tree_map(repeated, (example.args, kwargs))  # type: ignore[no-any-return]


def _mesh(job: Job, find_device: FindDevice) -> Any:
    """Replicas, and ranks that share every matrix, as a mesh; None if there are neither."""
    if job.replicas == job.tensor == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    device = find_device()
    if not dist.is_initialized():
        start_group(lambda: device, job.timeout)
    world, others = dist.get_world_size(), job.replicas * job.tensor
    if world % others:
        raise PipelineError(
            f"--replicas {job.replicas} --tensor {job.tensor} is for a multiple of {others} processes; {world} were "
            "started."
        )
    shape = job.replicas, world // others, job.tensor
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp", "pp", "tp"))
