"""Experts on the ranks of a group, without dropped tokens: `dispatch` sends every token to the
ranks of its experts, `combine` brings results back.

How many tokens a rank gets is decided by the router, and shapes of a compiled graph are fixed: an
exchange has room for a number of rows from each rank to each other, the capacity. The number of its
expert is sent with every row, so the host does not wait. If more tokens choose one rank than there
is room for, the step raises an error together with its losses.

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
    buffer of each row for the experts, those of padding last.
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
        count, local = rows.shape[0], self.experts // self.ranks
        capacity = self.capacity(count)
        total, device = self.ranks * capacity, rows.device
        order = experts.argsort(stable=True)
        ranks = experts[order] // local  # in rising order
        begins = torch.searchsorted(ranks, torch.arange(self.ranks, device=device))
        before = torch.arange(count, device=device) - begins[ranks]  # rows to the same rank
        if capacity < count:
            require_fit((before < capacity).all())
        slots = torch.where(before < capacity, ranks * capacity + before, total)
        sent = torch.zeros_like(slots).index_copy(0, order, slots)
        numbers = experts.new_full((total + 1,), local).index_copy(0, sent, experts % local)
        buffer = rows.new_zeros(total + 1, rows.shape[1]).index_copy(0, sent, rows)
        # both under way at once: rows are waited for when their experts are there
        received, numbers = self._exchange(buffer[:-1]), self._exchange(numbers[:-1])
        numbers, arrived = numbers.sort(stable=True)
        ends = torch.searchsorted(numbers, torch.arange(local, device=device), right=True)
        by_expert = torch.zeros_like(received).index_copy(0, arrived.argsort(), received)
        return DispatchedRows(by_expert, ends.int(), TokenRoute(sent, arrived))

    def combine(self, rows: Tensor, route: TokenRoute) -> Tensor:
        """Return the experts' results for the dispatched rows to the ranks that sent these, in
        their order, [n, width]. Padding is not read."""
        results = self._exchange(torch.zeros_like(rows).index_copy(0, route.arrived, rows))
        return results.index_select(0, route.sent.clamp(max=rows.shape[0] - 1))

    def _exchange(self, rows: Tensor) -> Tensor:
        """Exchanges parts: part i is sent to rank i, and part i of the result is received from
        it."""
        return rows if self.ranks == 1 else exchanged(rows, self.group)
