"""Finds the ranks: from a mesh, a process group, torchrun's environment, or this process alone."""

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.mesh import PARTS, Mesh, Replicas, mesh_of
from zbcompile.distributed.ranks import GroupRanks, Ranks
from zbcompile.distributed.transport import patience
from zbcompile.env import ORDERED
from zbcompile.errors import PipelineError
from zbcompile.faults.fault_store import FaultStore
from zbcompile.faults.rank_status import RankStatus
from zbcompile.faults.watch import Watch
from zbcompile.passes import gpu
from zbcompile.passes.meta_device import is_on_meta

FindDevice = Callable[[], torch.device]
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
# CUDA's default. Two neighbours have four channels, and each channel has a stream
FEWEST_QUEUES = 8


def find_ranks(find_device: FindDevice, ranks: int | None, mesh: Any, timeout: float) -> Ranks:
    """Returns the ranks of this process: one of a group if there is a mesh, a process group or
    torchrun's environment, else all of them. `find_device` is called once this process has its GPU.
    `timeout`: see `zbcompile.pipeline`."""
    if not is_alone(mesh):
        if mesh is None and not dist.is_initialized():
            start_group(find_device, timeout)
        return _group_ranks(find_device, mesh_of(mesh, timeout), ranks, timeout)
    if ranks is None:
        print(
            "zbcompile: neither torchrun nor ranks= gives a number of ranks; running as one rank in"
            " this process."
        )
    return Ranks(ranks or 1, find_device())


def is_alone(mesh: Any = None) -> bool:
    """Returns whether this process is the only one: there is no mesh, process group or environment
    of torchrun."""
    grouped = dist.is_available() and dist.is_initialized()
    return (
        mesh is None and not grouped and not ("RANK" in os.environ and "WORLD_SIZE" in os.environ)
    )


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the model's parameters. For a model on the meta device it is this
    process's GPU, or without one the CPU. Raises PipelineError if there are several devices."""
    devices = {
        tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta
    }
    if not devices and is_on_meta(model):
        return own_device()
    if len(devices) > 1:
        raise PipelineError(
            f"the model's tensors are on several devices: {', '.join(sorted(map(str, devices)))}."
            " Move it to one: model.to(device)."
        )
    return devices.pop() if devices else torch.device("cpu")


def own_device() -> torch.device:
    """This process's GPU; the CPU if it has none."""
    return gpu.current_device() if gpu.is_available() else torch.device("cpu")


def start_group(find_device: FindDevice, timeout: float) -> None:
    """Do what a script under torchrun would do itself: each local rank takes its own GPU, and the
    group gets the backend of the model's device. torch's own watchdog, which ends the process,
    comes after this package's.
    """
    if "RANK" not in os.environ:
        raise PipelineError("there are no other processes. Start the command with torchrun.")
    if gpu.is_available():
        # a launcher may show each process one GPU; two ranks on one are refused below
        number = int(os.environ.get("LOCAL_RANK", "0")) % gpu.device_count()
        gpu.make_current(torch.device(gpu.KIND, number))
    backend = gpu.BACKEND if gpu.is_gpu(find_device()) else "gloo"
    try:
        dist.init_process_group(backend, timeout=patience(backend, timeout))
    except (RuntimeError, ValueError) as error:
        raise PipelineError(
            f"rank {os.environ['RANK']} of {os.environ.get('WORLD_SIZE')} found no process group"
            f" (timeout={timeout:g}): {str(error).partition(chr(10))[0]} Start all processes, with"
            " the same MASTER_ADDR and MASTER_PORT, on machines that reach each other (set"
            " GLOO_SOCKET_IFNAME to the interface; `ip address` shows them), or give them more"
            " timeout=. torchrun sets what the environment must have."
        ) from error


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend by which a group moves the tensors of a device: "gloo" for the CPU, "nccl" for
    CUDA. Raises PipelineError if it has another one, or none."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    expected = {"cpu": "gloo", gpu.KIND: gpu.BACKEND}.get(device.type, "none")
    actual = backends.get(device.type, "none")
    if actual != expected or expected == "none":
        raise PipelineError(
            f"the model is on {device}, for which the process group has the backend {actual};"
            " expected "
            f"{expected}. Move the model (model.to(device)), or call"
            ' init_process_group("cpu:gloo,cuda:nccl").'
        )
    return expected


def _group_ranks(
    find_device: FindDevice, mesh: Mesh, ranks: int | None, timeout: float
) -> GroupRanks:
    size = mesh.size("pp")
    if ranks is not None and ranks != size:
        raise PipelineError(
            f"ranks={ranks}, but the process group has {size} pipeline ranks. Leave ranks= out, or"
            f" start {ranks} processes."
        )
    world: Any = dist.group.WORLD
    device, rank, ordered = find_device(), dist.get_rank(), ORDERED.read()
    gpu.make_current(
        device
    )  # torch gathers objects on that: on GPU 0 of all ranks, if a script only moved its model
    backend = backend_of(world, device)
    store = FaultStore(world, dist.get_process_group_ranks(world), rank)
    watch = Watch(RankStatus(rank), store, (world,), timeout, backend, device)
    try:
        with watch.region("the start"), watch.position.waiting("the making of groups"):
            if gpu.is_gpu(device):
                require_distinct_gpus(store.all_gather("gpu", gpu.identity(device)), device)
                warn_of_few_queues(os.environ)
            everyone = mesh.group(*mesh.names) or mesh.only_me()
            for name in mesh.names:
                mesh.group(name)  # now, as every rank makes it
            pipeline = mesh.group("pp") or mesh.only_me()
            replicas = Replicas(mesh.group(*PARTS), mesh.index(*PARTS), mesh.size(*PARTS))
    except BaseException:
        watch.close()
        raise
    watch.groups = tuple(
        {group for group in (pipeline, everyone, replicas.group) if group is not None}
    )
    return GroupRanks(
        count=size,
        device=device,
        watch=watch,
        mesh=mesh,
        replicas=replicas,
        group=pipeline,
        everyone=everyone,
        backend=backend,
        ordered=ordered or backend == gpu.BACKEND,
    )


def require_distinct_gpus(names: Mapping[int, str], device: torch.device) -> None:
    """Raises PipelineError if two ranks use one GPU: NCCL cannot connect it to itself.

    Args:
        names: The name of every rank's GPU, unique over all machines.
        device: That of this rank.
    """
    first_users: dict[str, int] = {}
    for rank, name in names.items():
        if name in first_users:
            raise PipelineError(
                f"ranks {first_users[name]} and {rank} use the same GPU ({name}); this rank's model"
                f" is on {device}. Give every process its own:"
                ' torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before model.cuda().'
            )
        first_users[name] = rank


def warn_of_few_queues(environment: Mapping[str, str]) -> None:
    """Warn if the streams of the channels have to share hardware queues with the passes. Then a
    second receive, which waits in its stream for the first, also holds back the pass whose result
    the sender of the first one needs.
    """
    value = environment.get(QUEUES, "")
    if value.isdecimal() and int(value) < FEWEST_QUEUES:
        warnings.warn(
            f"{QUEUES}={value}: streams that share a hardware queue of the GPU wait for each other,"
            " and a pipeline whose receives are posted early can stand still. Unset it (CUDA takes"
            f" {FEWEST_QUEUES}), or set it to 32.",
            RuntimeWarning,
            stacklevel=2,
        )
