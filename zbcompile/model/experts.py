"""Experts on the ranks of a group, without dropped tokens: `dispatch` sends every token to the
ranks of its experts, `combine` brings results back.

How many tokens a rank gets is decided by the router, and shapes of a compiled graph are fixed: an
exchange has room for a number of rows from each rank to each other, the capacity. Counts are sent
with the rows, so the host does not wait. If more tokens choose one rank than there is room for, the
step raises an error together with its losses.

Both methods only move rows: no number is added, so every bit is the model's own. Rows arrive sorted
by expert, those of one expert by the rank that sent them, and those of one rank in the order that
they had there.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbcompile.errors import PipelineError
from zbcompile.passes.graph.row_exchanges import require_fit
from zbcompile.torch_private import exchanged


class TokenRoute(NamedTuple):
    """The route of rows. `sent` has the place of each row in the buffer that this rank sends; a
    place behind its end means that the row did not fit. `arrived` has the place in the received
    buffer of each row for the experts; a place behind its end means a row of padding.
    """

    sent: Tensor
    arrived: Tensor


class DispatchedRows(NamedTuple):
    """The input of a rank's experts. `rows` [capacity, width] are sorted by expert. `ends` [experts
    of this rank], int32, has the number of the row behind the last one of each expert (`offs` of
    `torch.nn.functional.grouped_mm`); rows behind the last end are padding. `combine` takes the
    `route`."""

    rows: Tensor
    ends: Tensor
    route: TokenRoute


class ExpertExchange(nn.Module):
    """The exchange of an expert layer; a submodule of it, so that the pipeline finds it.

    Args:
        experts: how many experts the layer has over all ranks; rank r of the group has those from r
            x experts / ranks on.
        group: the process group of the "ep" dimension of the mesh; None: all experts are on this
            rank.
        factor: the capacity, as a multiple of what every rank would get if tokens chose them
            evenly. A step that needs more raises PipelineError; the number of ranks is enough for
            any routing. Evaluations have room for all.

    >>> exchange = ExpertExchange(experts=4)
    >>> tokens, experts = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0, 2])
    >>> rows, ends, route = exchange.dispatch(tokens, experts)
    >>> rows.flatten().tolist(), ends.tolist()
    ([2.0, 1.0, 3.0], [1, 1, 3, 3])
    >>> exchange.combine(rows * 10, route).flatten().tolist()
    [10.0, 20.0, 30.0]
    """

    def __init__(
        self, experts: int, group: dist.ProcessGroup | None = None, factor: float = 1.25
    ) -> None:
        super().__init__()
        self.experts, self.ranks = experts, 1 if group is None else group.size()
        # a module that holds a name can be copied
        self.group = "" if group is None else group.group_name
        self.factor = float(factor)
        if experts % self.ranks:
            raise PipelineError(
                f"ExpertExchange got experts={experts} and a group of {self.ranks} ranks, which"
                " must hold equally many. Pass a multiple, or a smaller group."
            )
        if not factor > 0:
            raise PipelineError(
                f"ExpertExchange got factor={factor}; expected a number above 0, such as 1.25."
            )

    def capacity(self, rows: int) -> int:
        """The number of rows with room from one rank to another if each rank sends `rows`."""
        if self.ranks == 1 or not torch.is_grad_enabled():
            return rows
        return min(rows, math.ceil(self.factor * rows / self.ranks))

    def dispatch(self, rows: Tensor, experts: Tensor) -> DispatchedRows:
        """Send each row of `rows` [n, width] to the rank of its expert, `experts` [n], whole
        numbers. A token that chooses several experts is a row for each: `x.repeat_interleave(k, 0)`
        and `chosen.flatten()`.
        """
        order = experts.argsort(stable=True)
        chosen = torch.zeros(self.experts, dtype=torch.int64, device=rows.device)
        chosen = chosen.scatter_add(0, experts, torch.ones_like(experts)).view(self.ranks, -1)
        count, per_rank = rows.shape[0], chosen.sum(1)
        capacity = self.capacity(count)
        places = _places(
            per_rank, count
        )  # of the sorted rows: their rank, and how many come before them there
        slots = torch.where(
            places.before < capacity, places.group * capacity + places.before, self.ranks * capacity
        )
        sent = torch.zeros_like(slots).index_copy(0, order, slots)
        if capacity < count:
            require_fit((per_rank <= capacity).all())
        ends = chosen.cumsum(1).clamp(max=capacity)
        fitting = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1])).flatten()
        received = self._exchange(_moved(rows, sent, self.ranks * capacity))
        counts = self._exchange(
            fitting
        )  # under way with the rows, which are waited for when the counts are there
        begins = capacity * torch.arange(self.ranks, device=rows.device)
        return _by_expert(received, counts.view_as(ends), begins, TokenRoute(sent, sent))

    def combine(self, rows: Tensor, route: TokenRoute) -> Tensor:
        """Return the experts' results for the dispatched rows to the ranks that sent these, in
        their order, [n, width]. Padding is not read."""
        results = _moved(rows, route.arrived, rows.shape[0])
        return self._exchange(results).index_select(0, route.sent.clamp(max=rows.shape[0] - 1))

    def _exchange(self, rows: Tensor) -> Tensor:
        """Exchanges parts: part i is sent to rank i, and part i of the result is received from
        it."""
        return rows if self.ranks == 1 else exchanged(rows, self.group)


def _by_expert(
    received: Tensor, counts: Tensor, begins: Tensor, route: TokenRoute
) -> DispatchedRows:
    """Returns the received rows in the order of this rank's experts. `counts` has the number of
    rows from each rank for each expert, `begins` the first row of each rank. The result's route has
    `arrived` filled in."""
    total = received.shape[0]
    by_expert = _places(counts.t().flatten(), total)
    first = counts.cumsum(1) - counts + begins.unsqueeze(1)
    first = torch.cat([first.t().flatten(), torch.zeros_like(first[0, :1])])
    real = by_expert.group < counts.numel()
    arrived = torch.where(real, first[by_expert.group] + by_expert.before, total).clamp(max=total)
    rows = _moved(received, _inverse(arrived, total), total)
    return DispatchedRows(
        rows, counts.sum(0).cumsum(0).clamp(max=total).int(), route._replace(arrived=arrived)
    )


class _GroupPlaces(NamedTuple):
    """The group of each row, where rows lie group by group, and how many rows of the group come
    before it."""

    group: Tensor
    before: Tensor


def _places(counts: Tensor, rows: int) -> _GroupPlaces:
    """The places of the first `rows` rows; those behind the last group are in one more."""
    ends, numbers = counts.cumsum(0), torch.arange(rows, device=counts.device)
    group = torch.searchsorted(ends, numbers, right=True)
    begins = torch.cat([torch.zeros_like(ends[:1]), ends])
    return _GroupPlaces(group, numbers - begins[group])


def _moved(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """A tensor of `count` rows, zeros but for `rows`, each at its place; those with place `count`
    are left out."""
    return rows.new_zeros(count + 1, rows.shape[1]).index_copy(0, places, rows)[:-1]


def _inverse(places: Tensor, count: int) -> Tensor:
    """Returns the row at each of `count` places, or `count` for a place without a row."""
    numbers = torch.arange(count, device=places.device)
    return torch.full_like(places.new_zeros(count + 1), count).index_copy(0, places, numbers)[:-1]
