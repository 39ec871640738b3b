"""The elements of a parameter that one replica owns and updates, or, if they are a whole parameter,
every replica alike."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

from zbcompile.distributed.packing import as_contiguous
from zbcompile.distributed.parcels import Parcel, send
from zbcompile.distributed.under_way import complete, outlives_its_step

LATE = -1  # in place of a stage: what is complete, and needed, outside of the program of a stage


@dataclass(eq=False)
class Slice:
    """The elements from `begin` to `end` of a parameter, in the order of its memory, which its
    owner updates as `tensor`: in the parameter's own memory, or as a float32 master. `divided` says
    whether the owner is one replica, number `owner` of `group`; a whole parameter belongs to all of
    them. `mine` says whether this process is an owner.

    `parameter` is plain; `given` is the one that an optimizer would be given whole, `shown` the one
    that users see: each may be a DTensor over the same memory. `flat` says whether `tensor` is a
    row of elements; otherwise it has the shape of the parameter. The gradient is complete with the
    last W of `stage`. `counts` says whether this process speaks for the slice, in norms and
    checkpoints.
    """

    name: str
    parameter: nn.Parameter
    given: nn.Parameter
    shown: nn.Parameter
    begin: int
    end: int
    stage: int
    counts: bool
    divided: bool = False
    flat: bool = False
    group: dist.ProcessGroup | None = None
    owner: int = 0
    mine: bool = True

    def __post_init__(self) -> None:
        self.tensor = (
            nn.Parameter(self.values, self.parameter.requires_grad) if self.divided else self.given
        )

    @property
    def memory(self) -> torch.Tensor:
        """The slice in the parameter's memory."""
        return memory_of(self.parameter)[self.begin : self.end]

    @property
    def values(self) -> torch.Tensor:
        """The slice in the parameter's memory, with the shape of `tensor`."""
        return self.memory if self.flat else self.given.detach()

    @property
    def is_master(self) -> bool:
        """Whether `tensor` may have digits that the parameter lacks."""
        return self.tensor.dtype != self.parameter.dtype

    @property
    def holder(self) -> nn.Parameter:
        """The tensor whose `.grad` an update uses."""
        return self.tensor if self.divided else self.parameter

    def give_master(self) -> None:
        """Update a float32 copy from now on."""
        self.tensor = nn.Parameter(self.values.float())

    def refresh(self, values: torch.Tensor) -> None:
        """Begin with these `values` of the parameter wherever a master does not round to them:
        there somebody else has written since."""
        own = self.tensor.detach()
        if self.is_master:
            own.copy_(torch.where(own.to(values.dtype) == values, own, values.to(own.dtype)))
        elif self.divided and own.data_ptr() != values.data_ptr():
            self.tensor.data = values  # the parameter has got other memory

    def add(self, part: torch.Tensor, copied: bool) -> None:
        """Add a sum, in the order of the parameter's memory, to the slice's gradient; it is
        `copied` if its memory is used elsewhere. A part of a sum is a copy, or all of the sum would
        stay alive."""
        own, dtype = self.parameter, self.tensor.dtype
        part = (part.clone() if copied or part.numel() < own.numel() else part).to(dtype)
        part = (
            part if self.flat else part.as_strided(own.shape, own.stride(), part.storage_offset())
        )
        self.tensor.grad = part if self.tensor.grad is None else self.tensor.grad.add_(part)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory, as a view."""
    return as_contiguous(tensor.detach()).view(-1)


def by_owner(
    slices: Iterable[Slice],
) -> Iterator[tuple[dist.ProcessGroup | None, int, list[Slice]]]:
    """What travels together. Several ranks hold what is late: they must add in the same order, so
    that it travels by itself."""
    for (group, owner, _), found in groupby(
        slices, key=lambda each: (each.group, each.owner, each.name if each.stage == LATE else "")
    ):
        yield group, owner, list(found)


def spread(slices: Iterable[Slice]) -> list[Parcel[Slice]]:
    """Begin to send what the parameters' memory holds of these slices from their owners to the
    other replicas."""
    parcels: list[Parcel[Slice]] = []
    for group, owner, found in by_owner(slices):
        parcels += send(((each, each.memory) for each in found), partial(_broadcast, group, owner))
    return parcels


def await_parcels(parcels: Iterable[Parcel[Slice]]) -> None:
    """Wait for them; each parameter has its values then."""
    for parcel in parcels:
        wait(parcel)
        parcel.unpack()


def wait(parcel: Parcel[Slice]) -> None:
    """Wait until nobody reads or writes its memory any more."""
    if parcel.work is not None:
        complete(parcel.work)


def _broadcast(group: dist.ProcessGroup | None, owner: int, flat: torch.Tensor) -> dist.Work | None:
    work = (
        None if group is None else dist.broadcast(flat, group=group, group_src=owner, async_op=True)
    )
    return None if work is None else outlives_its_step(work)
