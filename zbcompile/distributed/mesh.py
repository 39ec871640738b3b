"""The mesh around a pipeline: the dimensions along which ranks share a step, their process groups, and the replicas."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from zbcompile.distributed.packing import as_contiguous
from zbcompile.errors import PipelineError
from zbcompile.torch_private import is_bound, root_of

DIMENSIONS = {
    "pp": "the pipeline's ranks",
    "dp": "replicas",
    "tp": "tensor or sequence parallelism",
    "cp": "context parallelism",
    "ep": "experts",
}
BATCHES = ("dp", "ep")  # ranks along these pass batches of their own
PLACE = ("tp", "cp", "ep")  # ranks along these may run graphs of other sizes
PARTS = ("dp", "ep", "cp")  # ranks along these have losses of their own, which the step averages


@dataclass
class Mesh:
    """`layout` holds the ranks of all processes, with an axis for each of `names`, and this one at `place`. `groups`
    are those made so far; `made` lists the ones that torch's mesh did not bring along, which wait `timeout` seconds."""

    names: tuple[str, ...] = ()
    layout: torch.Tensor = field(default_factory=lambda: torch.tensor(0))
    place: tuple[int, ...] = ()
    groups: dict[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)
    made: list[dist.ProcessGroup] = field(default_factory=list)
    timeout: float = 300

    def size(self, *dimensions: str) -> int:
        """How many ranks there are along these dimensions; 1 along one that the mesh does not have."""
        lengths = (n for name, n in zip(self.names, self.layout.shape, strict=True) if name in dimensions)
        return torch.Size(lengths).numel()

    def index(self, *dimensions: str) -> int:
        """The number of this process among the ranks along these dimensions, the last one running fastest."""
        return self.index_of(dict(zip(self.names, self.place, strict=True)), dimensions)

    def index_of(self, place: dict[str, int], dimensions: Sequence[str]) -> int:
        """The number of the process at `place`."""
        number = 0
        for name in dimensions:
            number = number * self.size(name) + place.get(name, 0)
        return number

    def place_of(self, rank: int) -> dict[str, int]:
        """Where the process `rank` is, by dimension."""
        found = (self.layout == rank).nonzero()[0].tolist() if self.names else ()
        return dict(zip(self.names, found, strict=True))

    def beside(self, *dimensions: str) -> tuple[str, ...]:
        """The other dimensions that have more than one rank."""
        return tuple(name for name in DIMENSIONS if name not in dimensions and self.size(name) > 1)

    def ranks(self, dimensions: Sequence[str]) -> list[int]:
        """The processes that differ from this one along `dimensions` at most."""
        at = dict(zip(self.names, self.place, strict=True))
        places = [
            {**at, **dict(zip(dimensions, p, strict=True))} for p in product(*map(range, map(self.size, dimensions)))
        ]
        return [int(self.layout[tuple(place[name] for name in self.names)]) for place in places]

    def group(self, *dimensions: str) -> dist.ProcessGroup | None:
        """The process group of these ranks, all of which must ask for it, in one order; None if there is no other."""
        wanted = tuple(name for name in DIMENSIONS if name in dimensions and self.size(name) > 1)
        if not wanted:
            return None
        if wanted not in self.groups:
            self.groups[wanted] = self._make(self.ranks(wanted), " x ".join(wanted))
        return self.groups[wanted]

    def only_me(self) -> dist.ProcessGroup:
        """The group of this process alone: a pipeline of one rank."""
        if () not in self.groups:
            self.groups[()] = self._make([dist.get_rank()], "one rank")
        return self.groups[()]

    @property
    def labels(self) -> dict[str, str]:
        """The dimension of each process group of the mesh, by the group's name in this process."""
        return {group.group_name: key[0] for key, group in self.groups.items() if len(key) == 1}

    def _make(self, members: list[int], what: str) -> dist.ProcessGroup:
        if sorted(members) == list(range(dist.get_world_size())):
            return dist.group.WORLD  # type: ignore[return-value]
        if is_bound(dist.group.WORLD):
            raise PipelineError(
                f"the pipeline needs a group of some ranks ({what}), and the process group is bound to a device, so "
                "that only all ranks together can make one. Call init_process_group without device_id=."
            )
        made = new_group(members, self.timeout)
        self.made.append(made)
        return made


def new_group(members: list[int], timeout: float) -> dist.ProcessGroup:
    """A group of some ranks, which only these make. torch's own watchdog over NCCL comes after this package's."""
    patience = timedelta(seconds=timeout if dist.get_backend() == "gloo" else 2 * timeout)
    return dist.new_group(members, patience, use_local_synchronization=True)


def mesh_of(given: Any, timeout: float) -> Mesh:
    """The `given` mesh, None for one of the pipeline's ranks alone. Raises PipelineError if it is not a pipeline's."""
    if not dist.is_initialized():
        raise PipelineError(
            "mesh= was given, but this process has no process group. Start the script with torchrun and call "
            "init_process_group, or leave mesh= out: ranks= then runs all pipeline ranks in this process."
        )
    if given is None:
        world = dist.get_world_size()
        return Mesh(("pp",), torch.arange(world), (dist.get_rank(),), {("pp",): dist.group.WORLD}, timeout=timeout)  # type: ignore[dict-item]
    names = _require_fit(given)
    mesh = Mesh(names, given.mesh, tuple(given.get_coordinate()), timeout=timeout)
    mesh.groups |= {(name,): given[name].get_group() for name in names}
    return mesh


def _require_fit(given: Any) -> tuple[str, ...]:
    names = tuple(given.mesh_dim_names or ())
    if not names:
        raise PipelineError(f"mesh= has dimensions without names; expected some of {_known()}. Pass mesh_dim_names=.")
    sizes = dict(zip(names, given.mesh.shape, strict=True))
    for name in names:
        if name not in DIMENSIONS:
            raise PipelineError(f'mesh= has a dimension "{name}" of size {sizes[name]}; expected some of {_known()}.')
    root, world = root_of(given), dist.get_world_size()
    if root.size() != world:
        shape = " x ".join(
            f"{name}={size}" for name, size in zip(root.mesh_dim_names or (), root.mesh.shape, strict=False)
        )
        raise PipelineError(
            f"mesh= has {root.size()} ranks ({shape}), but there are {world} processes. Make a mesh of all of them."
        )
    left_out = [f'"{name}"' for name in root.mesh_dim_names or () if name not in names and root[name].size() > 1]
    if left_out:
        raise PipelineError(
            f"mesh= is only the part {tuple(names)} of a mesh that also has {', '.join(left_out)}: ranks along these "
            "would train on, and nothing would ever be averaged over them. Pass the whole mesh."
        )
    if not all(bool((given.mesh.diff(dim=i) > 0).all()) for i in range(len(names))):
        raise PipelineError(
            f"mesh= has the ranks {given.mesh.tolist()}; expected rising numbers along every dimension."
        )
    if given.get_coordinate() is None:
        raise PipelineError(
            f"mesh= ({sizes}) does not contain this process, rank {dist.get_rank()}. Pass the part that does."
        )
    return names


def _known() -> str:
    return ", ".join(f'"{name}" ({what})' for name, what in DIMENSIONS.items())


@dataclass
class Replicas:
    """The ranks that hold the same stages, one per loss that the step averages: along "dp", "ep" and "cp" of the mesh.
    This process is number `rank` of `count`.

    `synchronise` is False inside `no_sync`. `partial` are the parameters whose `.grad` holds this replica's part of the
    sum: those of steps without synchronisation. Of the others all replicas hold the whole sum, and all but the first
    clear it before they add to it, so that the next reduction counts it once.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    count: int = 1
    synchronise: bool = True
    partial: set[str] = field(default_factory=set)

    def forget(self) -> None:
        """Forget the gradients of a failed step."""
        self.partial.clear()


def broadcast(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all ranks of `group` the values of its first."""
    if group is not None:
        for tensor in tensors:
            dist.broadcast(as_contiguous(tensor.detach()), group=group, group_src=0)
