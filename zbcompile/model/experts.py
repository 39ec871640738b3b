"""Experts on the ranks of a group, without dropped tokens: `dispatch` sends every token to the ranks of its experts,
`combine` brings results back.

How many tokens a rank gets is decided by the router, and shapes of a compiled graph are fixed: an exchange has room for
a number of rows from each rank to each other, the capacity. Counts travel beside the rows, so the host waits for
nothing. If more tokens choose one rank than there is room for, the step notices it together with its losses and is done
again with a larger capacity (`zbcompile/api/repeated_steps.py`), before anything has changed.

Both methods only move rows: no number is added, so every bit is the model's own. Rows arrive sorted by expert, those of
one expert by the rank that sent them, and those of one rank in the order that they had there.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbcompile.errors import PipelineError
from zbcompile.passes.capture.deferred_checks import require_fit
from zbcompile.torch_private import exchanged


class TokenRoute(NamedTuple):
    """Where rows went: `sent` has the place of each row in what this rank sends (behind its end: it did not fit),
    `arrived` the place, among what has arrived, of each row that the experts get (behind its end: a row of padding)."""

    sent: Tensor
    arrived: Tensor


class DispatchedRows(NamedTuple):
    """What the experts of a rank get: `rows` [capacity x ranks, width], `ends` [experts of this rank], int32, the
    number of the row behind the last one of each expert (`offs` of `torch.nn.functional.grouped_mm`), and the `route`
    that `combine` takes. Rows behind the last end are padding."""

    rows: Tensor
    ends: Tensor
    route: TokenRoute


class ExpertExchange(nn.Module):
    """The exchange of an expert layer; a submodule of it, so that the pipeline finds it.

    Args:
        experts: how many experts the layer has over all ranks; rank r of the group has those from r x experts / ranks
            on.
        group: the process group of the "ep" dimension of the mesh; None: all experts are on this rank.
        factor: the capacity, as a multiple of what every rank would get if tokens chose them evenly. It is doubled,
            at most to the number of ranks, if a step needs more, and stays so. Nothing can overflow in evaluation.

    >>> exchange = ExpertExchange(experts=4)
    >>> rows, ends, route = exchange.dispatch(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 2]))
    >>> rows.flatten().tolist(), ends.tolist()
    ([2.0, 1.0, 3.0], [1, 1, 3, 3])
    >>> exchange.combine(rows * 10, route).flatten().tolist()
    [10.0, 20.0, 30.0]
    """

    def __init__(self, experts: int, group: dist.ProcessGroup | None = None, factor: float = 1.25) -> None:
        super().__init__()
        self.experts, self.ranks = experts, 1 if group is None else group.size()
        self.group = "" if group is None else group.group_name  # a module that holds a name can be copied
        self.factor = float(factor)
        if experts % self.ranks:
            raise PipelineError(
                f"ExpertExchange got experts={experts} and a group of {self.ranks} ranks, which must hold equally "
                "many. Pass a multiple, or a smaller group."
            )
        if not factor > 0:
            raise PipelineError(f"ExpertExchange got factor={factor}; expected a number above 0, such as 1.25.")

    def extra_repr(self) -> str:
        return f"experts={self.experts}, ranks={self.ranks}, factor={self.factor}"

    @property
    def may_overflow(self) -> bool:
        """Whether more tokens may arrive than there is room for."""
        return self.factor < self.ranks

    def capacity(self, rows: int) -> int:
        """The number of rows with room from one rank to another, if each rank sends `rows`."""
        if self.ranks == 1 or not torch.is_grad_enabled():
            return rows
        return min(rows, math.ceil(self.factor * rows / self.ranks))

    def dispatch(self, rows: Tensor, experts: Tensor) -> DispatchedRows:
        """Send each row of `rows` [n, width] to the rank of its expert, `experts` [n], whole numbers. A token that
        chooses several experts is a row for each: `x.repeat_interleave(k, 0)` and `chosen.flatten()`."""
        count, here = rows.shape[0], self.experts // self.ranks
        room = self.capacity(count)
        order = experts.argsort(stable=True)
        chosen = torch.zeros(self.experts, dtype=torch.int64, device=rows.device)
        chosen = chosen.scatter_add(0, experts, torch.ones_like(experts)).view(self.ranks, here)
        per_rank = chosen.sum(1)
        places = _places(per_rank, count)  # of the sorted rows: their rank, and how many come before them there
        slots = torch.where(places.before < room, places.group * room + places.before, self.ranks * room)
        sent = torch.zeros_like(slots).index_copy(0, order, slots)
        if room < count:
            require_fit((per_rank <= room).all())
        ends = chosen.cumsum(1).clamp(max=room)
        counts = self._exchange(ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1])).flatten()).view_as(ends)
        arrived = self._arrived(counts, room)
        packed = _moved(rows, sent, self.ranks * room)
        return DispatchedRows(
            rows=_moved(self._exchange(packed), _inverse(arrived, self.ranks * room), self.ranks * room),
            ends=counts.sum(0).cumsum(0).int(),
            route=TokenRoute(sent, arrived),
        )

    def combine(self, rows: Tensor, route: TokenRoute) -> Tensor:
        """Return the experts' results for the dispatched rows to the ranks that sent these, in their order, [n, width].
        Padding is not read."""
        back = self._exchange(_moved(rows, route.arrived, rows.shape[0]))
        return back.index_select(0, route.sent.clamp(max=rows.shape[0] - 1))

    def _arrived(self, counts: Tensor, room: int) -> Tensor:
        """The places, among what has arrived, of the rows in the order of this rank's experts; `counts` says how many
        are from each rank for each of them."""
        by_expert = _places(counts.t().flatten(), self.ranks * room)
        begins = counts.cumsum(1) - counts + room * torch.arange(self.ranks, device=counts.device).unsqueeze(1)
        begins = torch.cat([begins.t().flatten(), torch.zeros_like(begins[0, :1])])
        real = by_expert.group < counts.numel()
        return torch.where(real, begins[by_expert.group] + by_expert.before, self.ranks * room)

    def _exchange(self, rows: Tensor) -> Tensor:
        """Exchange parts: part i goes to rank i, and part i of the result comes from there."""
        return rows if self.ranks == 1 else exchanged(rows, self.group)


class _GroupPlaces(NamedTuple):
    """Of rows that lie group by group the number of their group, and how many rows of it come before them."""

    group: Tensor
    before: Tensor


def _places(counts: Tensor, rows: int) -> _GroupPlaces:
    """Of the first `rows`; those behind the last group are in one more."""
    ends, numbers = counts.cumsum(0), torch.arange(rows, device=counts.device)
    group = torch.searchsorted(ends, numbers, right=True)
    begins = torch.cat([torch.zeros_like(ends[:1]), ends])
    return _GroupPlaces(group, numbers - begins[group])


def _moved(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """A tensor of `count` rows, zeros but for `rows`, each at its place; those with place `count` are left out."""
    return rows.new_zeros(count + 1, rows.shape[1]).index_copy(0, places, rows)[:-1]


def _inverse(places: Tensor, count: int) -> Tensor:
    """Which row has each of `count` places; `count` for those that none has."""
    numbers = torch.arange(count, device=places.device)
    return torch.full_like(places.new_zeros(count + 1), count).index_copy(0, places, numbers)[:-1]
