"""Where the ranks come from: a mesh, a process group, torchrun's environment, or this process alone; and the network
interface that leads to the other machines: gloo asks the host's name, which often leads nowhere.

Under torchrun the agent keeps one store for all restarts, with the keys of ranks that have ended, and the nodes of a
job do not count restarts alike. So the ranks that are there now find each other by new names (`fresh_store`).
"""

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.clocks import progress_of
from zbcompile.distributed.fault_store import ANSWER, Board, cut_after
from zbcompile.distributed.faults import Position
from zbcompile.distributed.gpus import require_own_gpus, take_gpu, warn_of_few_queues
from zbcompile.distributed.mesh import PARTS, Mesh, MeshNames, Replicas, mesh_of
from zbcompile.distributed.ranks import GroupRanks, LocalRanks, Ranks
from zbcompile.distributed.watchdog import Watch
from zbcompile.env import ORDERED
from zbcompile.errors import PipelineError
from zbcompile.passes.capture.meta_device import is_on_meta
from zbcompile.torch_private import set_group_timeout

GLOO_TRIES = 5  # to connect; each may take the whole timeout of the group
FindDevice = Callable[[], torch.device]


def find_ranks(
    find_device: FindDevice, ranks: int | None, mesh: Any, timeout: float, names: MeshNames | None = None
) -> Ranks:
    """The ranks of this process: one of a group if a mesh, a process group or torchrun gives ranks, else all of them.
    `find_device` is asked once this process has its GPU. `timeout`, and `names` as `mesh_names=`: see
    `zbcompile.pipeline`."""
    if names and mesh is None:
        raise PipelineError("mesh_names= was given without mesh=, whose dimensions it names. Pass mesh= as well.")
    if not is_alone(mesh):
        if mesh is None and not dist.is_initialized():
            start_group(find_device, timeout)
        return _group_ranks(find_device, mesh_of(mesh, timeout, names), ranks, timeout)
    if ranks is None:
        print("zbcompile: neither torchrun nor ranks= gives a number of ranks; running as one rank in this process.")
    return LocalRanks(ranks or 1, find_device())


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
        _start("nccl" if cuda else "gloo", timeout, 2 * timeout if cuda else timeout)
    except RuntimeError as error:
        raise PipelineError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} found no process group after "
            f"{time.monotonic() - began:.0f} s (timeout={timeout:g}): "
            f"{error}. Start all processes, with the same MASTER_ADDR and MASTER_PORT, on machines that reach each "
            f"other by {os.environ.get(VARIABLE, 'the address of their host name')} (set {VARIABLE} to the interface; "
            "python -m zbcompile.doctor shows them), or give them more timeout=."
        ) from error


def _start(backend: str, seconds: float, patience: float) -> None:
    """Make the group of all processes within `seconds`; torch waits `patience` in its collectives."""
    let_gloo_find(os.environ["MASTER_ADDR"])
    end = time.monotonic() + seconds
    with cut_after(seconds + ANSWER, int(os.environ["MASTER_PORT"])):
        store, rank, ranks = next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = fresh_store(store, rank, ranks, end - time.monotonic())
        left = timedelta(seconds=max(1.0, end - time.monotonic()))
        store.set_timeout(left)
        connecting = left / GLOO_TRIES if backend == "gloo" else timedelta(seconds=patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=connecting)
    set_group_timeout(timedelta(seconds=patience))


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


def _group_ranks(find_device: FindDevice, mesh: Mesh, ranks: int | None, timeout: float) -> GroupRanks:
    size = mesh.size("pp")
    if ranks is not None and ranks != size:
        raise PipelineError(
            f"ranks={ranks}, but the process group has {size} pipeline ranks. Leave ranks= out, or start {ranks} "
            "processes."
        )
    everyone = mesh.group(*mesh.names) or mesh.only_me()
    device, own = find_device(), dist.get_rank()
    backend = backend_of(everyone, device)
    board = Board(everyone, dist.get_process_group_ranks(everyone), own, timeout)
    if device.type == "cuda":
        require_own_gpus(board, device, timeout)
        warn_of_few_queues(os.environ)
    pipeline = mesh.group("pp") or mesh.only_me()
    replicas = Replicas(mesh.group(*PARTS), mesh.index(*PARTS), mesh.size(*PARTS))
    groups = {group for group in (pipeline, everyone, replicas.group) if group is not None}
    watch = Watch(Position(own), board, tuple(groups), timeout, backend, progress_of(device))
    ordered = backend == "nccl" or ORDERED.read()
    return GroupRanks(pipeline, everyone, mesh, device, backend, watch, replicas, ordered)


PAUSE = 0.05  # seconds between two looks at the store
ROUND = timedelta(seconds=1)  # for all to have seen the same list


def fresh_store(store: dist.Store, rank: int, ranks: int, timeout: float) -> dist.Store:
    """The part of `store` that the ranks of this start share with no earlier one. Raises RuntimeError if one is
    missing after `timeout` seconds.

    Every rank announces a name that nobody had before. Rank 0 lists those that it sees; a list counts once every rank
    has found its name in it, which those of an earlier start cannot.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout
    store.set(_member(rank), own)
    while time.monotonic() < end:
        if rank == 0 and store.check([_member(other) for other in range(ranks)]):
            store.set("zbcompile/starting", ",".join(store.get(_member(other)).decode() for other in range(ranks)))
        names = store.get("zbcompile/starting").decode() if store.check(["zbcompile/starting"]) else ""
        if own in names:
            start = f"zbcompile/start-{hashlib.sha256(names.encode()).hexdigest()}"
            store.set(f"{start}/{rank}", "here")
            if _all_came(store, [f"{start}/{other}" for other in range(ranks)]):
                return dist.PrefixStore(start, store)
        time.sleep(PAUSE)
    raise RuntimeError(f"not all of the {ranks} ranks arrived within {timeout:g} s")


def _member(rank: int) -> str:
    return f"zbcompile/member/{rank}"


def _all_came(store: dist.Store, keys: list[str]) -> bool:
    try:
        store.wait(keys, ROUND)
    except RuntimeError:
        return False
    return True


VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF = 0x8915  # Linux: SIOCGIFADDR


def interfaces() -> dict[str, str]:
    """The IPv4 address of every interface that has one, by its name; empty on systems other than Linux."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_towards(host: str) -> str | None:
    """The interface through which `host` is reached; None on a loopback, where gloo needs to be told nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((host, 9))  # sends nothing
        address = asked.getsockname()[0]
        if not ipaddress.ip_address(address).is_loopback:
            return next((name for name, own in interfaces().items() if own == address), None)
    return None


def let_gloo_find(host: str) -> None:
    """Let gloo connect through the interface that leads to `host`, unless the environment names one, now and later."""
    name = None if VARIABLE in os.environ else interface_towards(host)
    if name is not None:
        os.environ[VARIABLE] = name
