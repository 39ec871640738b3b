"""Where the ranks come from: a mesh, a process group, torchrun's environment, or this process alone."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.device_progress import progress_of
from zbcompile.distributed.fault_store import Board
from zbcompile.distributed.faults import Position
from zbcompile.distributed.gpus import require_own_gpus, take_gpu
from zbcompile.distributed.ranks import GroupRanks, LocalRanks, Ranks
from zbcompile.distributed.replicas import Replicas
from zbcompile.distributed.watchdog import Watch
from zbcompile.env import ORDERED
from zbcompile.errors import PipelineError
from zbcompile.passes.capture.meta_device import is_on_meta
from zbcompile.torch_private import is_bound

FindDevice = Callable[[], torch.device]


def find_ranks(find_device: FindDevice, ranks: int | None, mesh: Any, timeout: float) -> Ranks:
    """The ranks of this process: one of a group if a mesh, a process group or torchrun gives ranks, else all of them.
    `find_device` is asked once this process has its GPU. `timeout`: see `zbcompile.pipeline`."""
    if mesh is not None:
        return _group_ranks(find_device, _sides(mesh), ranks, timeout)
    if not is_alone(mesh):
        if not dist.is_initialized():
            start_group(find_device, timeout)
        return _group_ranks(find_device, Sides(dist.group.WORLD, dist.group.WORLD, Replicas()), ranks, timeout)
    if ranks is None:
        print("zbcompile: neither torchrun nor ranks= gives a number of ranks; running as one rank in this process.")
    count = 1 if ranks is None else ranks
    if count < 1:
        raise PipelineError(f"ranks={count}; expected a positive number of ranks.")
    return LocalRanks(count, find_device())


def is_alone(mesh: Any = None) -> bool:
    """Whether nothing gives this process other ranks: no mesh, no process group, no torchrun."""
    grouped = dist.is_available() and dist.is_initialized()
    return mesh is None and not grouped and not ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's parameters; a pipeline stage lives on one device. A model on the meta device goes to
    this process's GPU, or without one to the CPU."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
    if not devices and is_on_meta(model):
        return own_device("cuda" if torch.cuda.is_available() else "cpu")
    if len(devices) > 1:
        raise PipelineError(
            f"the model's tensors are on several devices: {', '.join(sorted(map(str, devices)))}. Move it to one: "
            "model.to(device)."
        )
    return devices.pop() if devices else torch.device("cpu")


def own_device(kind: str) -> torch.device:
    """This process's device of a kind; the CPU if it has none."""
    if kind == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def start_group(find_device: FindDevice, timeout: float) -> None:
    """Do what a script under torchrun would do itself: each local rank takes its own GPU, and the group gets the
    backend of the model's device. torch's own watchdog, which ends the process, comes after this package's."""
    if "RANK" not in os.environ:
        raise PipelineError("there are no other processes. Start the command with torchrun.")
    if torch.cuda.is_available():
        take_gpu()
    cuda = find_device().type == "cuda"
    began = time.monotonic()
    try:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=2 * timeout if cuda else timeout))
    except RuntimeError as error:
        raise PipelineError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} found no process group after "
            f"{time.monotonic() - began:.0f} s (timeout={timeout:g}): "
            f"{error}. Start all processes, with the same MASTER_ADDR and MASTER_PORT, or give them more timeout=."
        ) from error


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend by which a group moves the tensors of a device: "gloo" for the CPU, "nccl" for CUDA. Raises
    PipelineError if it has another one, or none."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    wanted, found = {"cpu": "gloo", "cuda": "nccl"}.get(device.type, "none"), backends.get(device.type, "none")
    if found != wanted or wanted == "none":
        raise PipelineError(
            f"the model is on {device}, for which the process group has the backend {found}; expected "
            f'{wanted}. Move the model (model.to(device)), or call init_process_group("cpu:gloo,cuda:nccl").'
        )
    return wanted


def _sides(mesh: Any) -> "Sides":
    """The groups of a mesh: "pp" gives the pipeline's ranks, "dp", if it exists, the replicas."""
    names = tuple(mesh.mesh_dim_names or ())
    if "pp" not in names:
        raise PipelineError(f'mesh= has dimensions {names or "without names"}; expected one called "pp".')
    others = {name: mesh[name].size() for name in names if name not in ("pp", "dp") and mesh[name].size() > 1}
    if others:
        raise PipelineError(
            f'mesh= has more than one rank in {others}; a pipeline knows the dimensions "pp" and "dp". Use a mesh of '
            "these two."
        )
    group = mesh["pp"].get_group()
    if "dp" not in names or mesh["dp"].size() == 1:
        return Sides(group, group, Replicas())
    replicas = Replicas(mesh["dp"].get_group(), mesh["dp"].get_local_rank(), mesh["dp"].size())
    return Sides(group, _whole(mesh), replicas)


def _whole(mesh: Any) -> Any:
    """The group of all ranks of a mesh."""
    members = sorted(mesh.mesh.flatten().tolist())
    if members == list(range(dist.get_world_size())):
        return dist.group.WORLD
    if is_bound(dist.group.WORLD):
        raise PipelineError(
            "mesh= covers a part of the ranks, and the process group is bound to a device, so only all ranks together "
            "can make a new group. Call init_process_group without device_id=."
        )
    return dist.new_group(members, use_local_synchronization=True)


@dataclass(frozen=True)
class Sides:
    """The process groups of a pipeline: its own ranks, those of all replicas, and those that hold the same stages."""

    group: Any
    everyone: Any
    replicas: Replicas


def _group_ranks(find_device: FindDevice, sides: Sides, ranks: int | None, timeout: float) -> GroupRanks:
    group, everyone = sides.group, sides.everyone
    size = dist.get_world_size(group)
    if ranks is not None and ranks != size:
        raise PipelineError(
            f"ranks={ranks}, but the process group has {size} ranks. Leave ranks= out, or start {ranks} processes."
        )
    device, own = find_device(), dist.get_rank()
    backend = backend_of(group, device)
    board = Board(everyone, dist.get_process_group_ranks(everyone), own)
    if device.type == "cuda":
        require_own_gpus(board, device, timeout)
    groups = {group, everyone} | ({sides.replicas.group} if sides.replicas.group else set())
    watch = Watch(Position(own), board, tuple(groups), timeout, backend, progress_of(device))
    ordered = backend == "nccl" or ORDERED.read()
    return GroupRanks(group, everyone, dist.get_rank(group), size, device, backend, watch, sides.replicas, ordered)
