"""Ranks: which ranks of a pipeline this process plays, and what it tells the other processes
outside of a step."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zbcompile.distributed.mesh import Mesh, Replicas, new_group
from zbcompile.distributed.transport import (
    Channels,
    OrderedLinks,
    PointToPoint,
    TaggedLinks,
    Transport,
)
from zbcompile.env import OF_MESSAGES
from zbcompile.errors import PipelineError
from zbcompile.faults.rank_status import LocalWatch, RankStatus
from zbcompile.faults.watch import Watch
from zbcompile.passes.torch_private import group_called
from zbcompile.program.edges import channels_of
from zbcompile.schedules.ir.schedule import Schedule

Value = TypeVar("Value")


@dataclass
class Ranks:
    """The ranks of a pipeline as one process sees them. This base class is for a process that plays
    all of them.

    `local` are those that this process plays, of `count` in all; `rank` is the only one, None if it
    plays all of them. `group` is the pipeline's process group, `everyone` that of the whole mesh,
    None without one; `mesh` says which other ranks share the step. `watch` guards what ranks do
    together, and names in its errors the processes by `members`, among which this one has the place
    `number`. `leads` says whether this process is the first of those that hold the same stages, and
    writes for them; `is_first` whether it has the first rank of all, the one that prints and writes
    files. `terms` are settings that must be equal in all processes, or their messages do not meet.
    Every process must make each of the calls below, in one common order.
    """

    count: int
    device: torch.device
    watch: LocalWatch | Watch = field(default_factory=lambda: LocalWatch(RankStatus()))
    mesh: Mesh = field(default_factory=Mesh)
    replicas: Replicas = field(default_factory=Replicas)
    rank: int | None = None
    group: ProcessGroup | None = None
    everyone: ProcessGroup | None = None
    members: Sequence[int] = (0,)
    number: int = 0
    leads: bool = True
    is_first: bool = True
    terms: Mapping[str, object] = field(default_factory=dict)

    @property
    def local(self) -> tuple[int, ...]:
        return tuple(range(self.count)) if self.rank is None else (self.rank,)

    def refusal(self, text: str) -> PipelineError:
        """The error for a refusal that every process raises now, for the same reason."""
        error = PipelineError(text)
        self.watch.on_all_ranks(error)
        return error

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Context for a call that returns only when other ranks make it too."""
        return self.watch.position.waiting(what)

    def gather(self, value: Value) -> list[Value]:
        """The value of every process of the mesh, in the order of `members`."""
        return [value]

    def gather_here(self, value: Value) -> list[Value]:
        """The value of every process of this pipeline."""
        return [value]

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """Overwrite `tensor` with the one of pipeline rank `rank`."""

    def largest(self, numbers: Tensor) -> Tensor:
        """The elementwise maximum over the processes of the mesh."""
        return numbers

    def transport(self, schedule: Schedule, microbatches: int, number: int) -> Transport:
        """Returns the transport for the messages of one pass over `microbatches`, of program
        `number`, over the channels of `schedule`."""
        return Transport()

    def collective_group(self) -> ProcessGroup | None:
        """The process group of the vocabulary's collectives, made at the first call; None in one
        process."""
        return None

    def new_gloo_group(self) -> ProcessGroup | None:
        """A new process group of all, over gloo, for a thread that speaks to the others while they
        train."""
        return None

    def watch_over(self, names: Iterable[str]) -> None:
        """Process groups that the graphs communicate through, by name, and those that the mesh has
        made: they end with this pipeline when one of its ranks fails, so that their other ranks do
        not wait for it."""

    def disconnect(self) -> None:
        """Release per-rank resources (channels)."""


@dataclass(kw_only=True)
class GroupRanks(Ranks):
    """This process is one rank of a process group of `backend`."""

    group: ProcessGroup
    everyone: ProcessGroup
    watch: Watch
    backend: str
    ordered: bool  # messages are told apart only by their order, as with NCCL
    collectives: ProcessGroup | None = None
    # over gloo; `everyone` may be a group of devices
    hosts: ProcessGroup | None = None
    links: OrderedLinks = field(default_factory=OrderedLinks)
    # the needs of the schedules whose channels these are
    opened_for: set[Hashable] = field(default_factory=set)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.mesh.index("pp")
        self.members = self.watch.store.members
        self.number = self.members.index(self.watch.store.rank)
        self.leads = self.mesh.index(*self.mesh.beside("pp")) == 0
        self.is_first = self.rank == 0 and self.leads
        self.terms = {
            "timeout": self.watch.timeout,
            **{setting.name: setting.read() for setting in OF_MESSAGES},
        }

    def gather(self, value: Value) -> list[Value]:
        return self._gather(value, self.everyone)

    def gather_here(self, value: Value) -> list[Value]:
        return self._gather(value, self.group)

    def _gather(self, value: Any, group: ProcessGroup) -> list[Any]:
        values = [value] * dist.get_world_size(group)
        with self.waiting("the exchange"):
            dist.all_gather_object(values, value, group=group)
        return values

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        dist.broadcast(tensor, group=self.group, group_src=rank)

    def largest(self, numbers: Tensor) -> Tensor:
        if self.hosts is None:  # a device would first have to end the step before
            self.hosts = self.everyone if self.backend == "gloo" else self.new_gloo_group()
        with self.waiting("the comparison"):
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.hosts)
        return numbers

    def transport(self, schedule: Schedule, microbatches: int, number: int) -> Transport:
        channels: Channels
        if self.ordered:
            channels = self.channels(schedule)
        else:
            call = f"{self.watch.position.doing} ({number})"
            channels = TaggedLinks(self.group, microbatches, call)
        return PointToPoint(channels=channels, device=self.device)

    def channels(self, schedule: Schedule) -> OrderedLinks:
        """Returns the channels between the ranks of a schedule. Those of this rank that no earlier
        call opened are opened now."""
        needs = schedule.placement, schedule.ops
        if needs not in self.opened_for:
            store = self.watch.store.channel_store(self.group)
            with self.waiting("the opening of the channels"):
                links = self.links.open(
                    self.backend,
                    channels_of(schedule),
                    self.rank,
                    store,
                    self.device,
                    self.watch.timeout,
                )
            self.opened_for.add(needs)
            self.watch.groups = (*self.watch.groups, *links)
        return self.links

    def collective_group(self) -> ProcessGroup:
        if self.collectives is None:
            members = dist.get_process_group_ranks(self.group)
            with self.waiting("the making of a group"):
                self.collectives = new_group(members, self.watch.timeout)
            self.watch.groups = (*self.watch.groups, self.collectives)
        return self.collectives

    def new_gloo_group(self) -> ProcessGroup:
        group = new_group(dist.get_process_group_ranks(self.everyone), self.watch.timeout, "gloo")
        self.watch.groups = (*self.watch.groups, group)
        return group

    def watch_over(self, names: Iterable[str]) -> None:
        groups = (*self.watch.groups, *self.mesh.groups.values(), *map(group_called, names))
        self.watch.groups = tuple(set(groups))

    def disconnect(self) -> None:
        """Closes the channels; all ranks call it, as NCCL ends a communicator from both its
        ends."""
        self.links.close(self.backend, broken=self.watch.fault is not None)
        self.links = OrderedLinks()
        self.opened_for.clear()
