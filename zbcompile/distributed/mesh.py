"""The mesh around a pipeline: the dimensions along which ranks share a step, their process groups,
and the replicas."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zbcompile.distributed.transport import as_contiguous, patience
from zbcompile.errors import PipelineError
from zbcompile.torch_private import groups_of_process, is_bound

DIMENSIONS = {
    "pp": "the pipeline's ranks",
    "dp": "replicas",
    "tp": "tensor or sequence parallelism",
    "cp": "context parallelism",
    "ep": "experts",
}
BATCHES = ("dp", "ep")  # ranks along these pass batches of their own
PLACE = ("tp", "cp", "ep")  # ranks along these dimensions may have graphs of different sizes
PARTS = ("dp", "ep", "cp")  # ranks along these have losses of their own, which the step averages


@dataclass
class Mesh:
    """The mesh around a pipeline, as this process sees it. `layout` holds the ranks of all
    processes, with an axis for each of `names`, and this process at `place`. `groups` are the
    process groups in use so far; those that are made here have a timeout of `timeout` seconds."""

    names: tuple[str, ...] = ()
    layout: torch.Tensor = field(default_factory=lambda: torch.tensor(0))
    place: tuple[int, ...] = ()
    groups: dict[tuple[str, ...], ProcessGroup] = field(default_factory=dict)
    timeout: float = 300

    def size(self, *dimensions: str) -> int:
        """How many ranks there are along these dimensions; 1 along one that the mesh does
        not have."""
        lengths = (
            n for name, n in zip(self.names, self.layout.shape, strict=True) if name in dimensions
        )
        return torch.Size(lengths).numel()

    def index(self, *dimensions: str) -> int:
        """The number of this process among the ranks along these dimensions, the last one running
        fastest."""
        return self.index_of(dict(zip(self.names, self.place, strict=True)), dimensions)

    def index_of(self, place: dict[str, int], dimensions: Sequence[str]) -> int:
        """The number of the process at `place`."""
        number = 0
        for name in dimensions:
            number = number * self.size(name) + place.get(name, 0)
        return number

    def place_of(self, rank: int) -> dict[str, int]:
        """Returns the place of the process `rank`, by dimension."""
        labels = (self.layout == rank).nonzero()[0].tolist() if self.names else ()
        return dict(zip(self.names, labels, strict=True))

    def beside(self, *dimensions: str) -> tuple[str, ...]:
        """The dimensions that have more than one rank, without these."""
        return tuple(name for name in DIMENSIONS if name not in dimensions and self.size(name) > 1)

    def ranks(self, dimensions: Sequence[str]) -> list[int]:
        """The processes that differ from this one along `dimensions` alone."""
        at = dict(zip(self.names, self.place, strict=True))
        places = [
            {**at, **dict(zip(dimensions, p, strict=True))}
            for p in product(*map(range, map(self.size, dimensions)))
        ]
        return [int(self.layout[tuple(place[name] for name in self.names)]) for place in places]

    def group(self, *dimensions: str) -> ProcessGroup | None:
        """The process group of the ranks along these dimensions; None if this process is the only
        one. All of them must ask for groups in one order."""
        key = tuple(name for name in DIMENSIONS if name in dimensions and self.size(name) > 1)
        if not key:
            return None
        if key not in self.groups:
            self.groups[key] = self._make(self.ranks(key))
        return self.groups[key]

    def only_me(self) -> ProcessGroup:
        """The group of this process alone: a pipeline of one rank."""
        if () not in self.groups:
            self.groups[()] = self._make([dist.get_rank()])
        return self.groups[()]

    @property
    def labels(self) -> dict[str, str]:
        """The dimension of each process group of this process, by the group's name: of the mesh's
        own groups, and of all others of the same ranks, such as those of a second DeviceMesh."""
        along = {
            tuple(self.ranks((name,))): name for name in reversed(self.names) if self.size(name) > 1
        }
        labels = {
            name: along[members]
            for name, members in groups_of_process().items()
            if members in along
        }
        return labels | {
            group.group_name: key[0] for key, group in self.groups.items() if len(key) == 1
        }

    def _make(self, members: list[int]) -> ProcessGroup:
        world: Any = dist.group.WORLD
        if sorted(members) == list(range(dist.get_world_size())):
            return world  # type: ignore[no-any-return]
        return new_group(members, self.timeout)


def new_group(members: list[int], timeout: float, backend: str | None = None) -> ProcessGroup:
    """A group of some ranks, which only these ranks make; by default with the backend of the
    process group. Raises PipelineError if torch cannot make it."""
    if len(members) < dist.get_world_size() and is_bound(dist.group.WORLD):
        raise PipelineError(
            f"the pipeline needs a group of the ranks {members}, and the process group is bound to"
            " a device, so that only all ranks together can make one. Call init_process_group"
            " without device_id=."
        )
    waits = patience(backend or dist.get_backend(), timeout)
    return dist.new_group(members, waits, backend, use_local_synchronization=True)


def mesh_of(device_mesh: Any, timeout: float) -> Mesh:
    """Returns the mesh of a DeviceMesh; of None that of the pipeline's ranks alone. Raises
    PipelineError if it is not a pipeline's."""
    if not dist.is_initialized():
        raise PipelineError(
            "mesh= was given, but this process has no process group. Start the script with torchrun"
            " and call init_process_group, or leave mesh= out: ranks= then runs all pipeline ranks"
            " in this process."
        )
    if device_mesh is None:
        world = dist.get_world_size()
        groups: Any = {("pp",): dist.group.WORLD}
        return Mesh(("pp",), torch.arange(world), (dist.get_rank(),), groups, timeout=timeout)
    names = _dimensions(device_mesh)
    if device_mesh.size() != dist.get_world_size():
        raise PipelineError(
            f"mesh= has {device_mesh.size()} ranks along {names}, and there are"
            f" {dist.get_world_size()} processes: the others would train on, and nothing would ever"
            " be averaged over them. Pass the whole mesh, made of all processes."
        )
    layout = device_mesh.mesh.reshape(
        [size for name, size in _sizes(device_mesh).items() if name in names]
    )
    if not all(bool((layout.diff(dim=i) > 0).all()) for i in range(len(names))):
        raise PipelineError(
            f"mesh= has the ranks {layout.tolist()}; expected rising numbers along every dimension."
        )
    place = tuple((layout == dist.get_rank()).nonzero()[0].tolist())
    groups = {(name,): device_mesh[name].get_group() for name in names}
    return Mesh(names, layout, place, groups, timeout=timeout)


def _sizes(device_mesh: Any) -> dict[str, int]:
    return dict(zip(device_mesh.mesh_dim_names or (), device_mesh.mesh.shape, strict=False))


def _dimensions(device_mesh: Any) -> tuple[str, ...]:
    """The pipeline's dimensions of a DeviceMesh in its order; others may have one rank each. Raises
    PipelineError."""
    sizes = _sizes(device_mesh)
    if not sizes:
        raise PipelineError(
            f"mesh= has dimensions without names; expected some of {_dimension_names()}. Pass"
            " mesh_dim_names=."
        )
    for name in sizes:
        if sizes[name] > 1 and name not in DIMENSIONS:
            raise PipelineError(
                f'mesh= has a dimension "{name}" of size {sizes[name]}; expected some of'
                f" {_dimension_names()}. Give dimensions these names in mesh_dim_names=, and"
                " flatten several into one of them first."
            )
    return tuple(name for name in sizes if name in DIMENSIONS)


def _dimension_names() -> str:
    return ", ".join(f'"{name}" ({what})' for name, what in DIMENSIONS.items())


@dataclass
class Replicas:
    """The ranks that hold the same stages, one per loss that the step averages: along "dp", "ep"
    and "cp" of the mesh. This process is number `rank` of `count`.

    `synchronise` is False inside `no_sync`. `partial` are the parameters whose `.grad` holds this
    replica's part of the sum: those of steps without synchronisation. Of the others all replicas
    hold the whole sum, and all but the first clear it before they add to it, so that the next
    reduction counts it once.
    """

    group: ProcessGroup | None = None
    rank: int = 0
    count: int = 1
    synchronise: bool = True
    partial: set[str] = field(default_factory=set)


def broadcast(tensors: Iterable[torch.Tensor], group: ProcessGroup | None) -> None:
    """Give all ranks of `group` the values of its first."""
    if group is not None:
        for tensor in tensors:
            dist.broadcast(as_contiguous(tensor.detach()), group=group, group_src=0)
