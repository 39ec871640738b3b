"""Exchanges of rows whose counts are known only when they run.

`exchange_rows` is an operator: the host reads the counts, sends as many rows, and receives into a
tensor of fixed size that ends with zeros.

`RoutedExchanges` makes such operators of functional all-to-alls whose parts have sizes that forward
reads out of a tensor, as expert layers do that send tokens where a router says. A trace has no
value for the numbers of such a list: they pass for ints, and all that they are good for is to be
given to an all-to-all. Its result has room for all rows that may come.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from zbcompile.passes.torch_private import group_called

_REPEATS = (Tensor.repeat_interleave, torch.repeat_interleave)


@torch.library.custom_op("zbcompile::exchange_rows", mutates_args=())
def exchange_rows(
    rows: Tensor, sent: Tensor, arriving: Tensor, count: int, group_name: str
) -> Tensor:
    """Sends `sent[i]` rows to rank i of the group, in the order of the ranks, and receives
    `arriving[i]` from it. Returns the first `count` rows received, padded by zeros."""
    sent_counts, received_counts = sent.tolist(), arriving.tolist()
    source, received = (
        _first(rows, sum(sent_counts)),
        rows.new_empty(sum(received_counts), *rows.shape[1:]),
    )
    torch.distributed.all_to_all_single(
        received, source, received_counts, sent_counts, group=group_called(group_name)
    )
    return _first(received, count)


def _first(rows: Tensor, count: int) -> Tensor:
    """The first `count` rows in memory of their own, with zeros behind if there are less."""
    padded = rows.new_zeros(count, *rows.shape[1:])
    padded[: rows.shape[0]] = rows[:count]
    return padded


@exchange_rows.register_fake
def _(rows: Tensor, sent: Tensor, arriving: Tensor, count: int, group_name: str) -> Tensor:
    return rows.new_empty(count, *rows.shape[1:])


def _keep(ctx: object, inputs: tuple[Tensor, Tensor, Tensor, int, str], output: Tensor) -> None:
    rows, sent, arriving, _, ctx.group = inputs  # type: ignore[attr-defined]
    ctx.rows = rows.shape[0]  # type: ignore[attr-defined]
    ctx.save_for_backward(sent, arriving)  # type: ignore[attr-defined]


def _back(ctx: object, gradient: Tensor) -> tuple[Tensor | None, ...]:
    sent, arriving = ctx.saved_tensors  # type: ignore[attr-defined]
    return exchange_rows(gradient, arriving, sent, ctx.rows, ctx.group), *(None,) * 4  # type: ignore[attr-defined]


exchange_rows.register_autograd(_back, setup_context=_keep)


def require_fit(fits: Tensor) -> None:
    """Raises RuntimeError if `fits` is False: tokens have no room in an exchange between experts.

    How many tokens choose an expert is known only while a step runs. A trace goes on as if they
    fitted; whether they did is a result of the step, at which the engine looks together with the
    losses.
    """
    if has_torch_function((fits,)):
        handle_torch_function(require_fit, (fits,), fits)
    elif not fits:
        raise RuntimeError(
            "more tokens chose the experts of one rank than its capacity. Pass a larger factor= to "
            "ExpertExchange: its number of ranks is enough for any routing."
        )


class RoutedCount:
    """A number that a trace does not know: element `place` of `counts`."""

    def __init__(self, counts: Tensor, place: int) -> None:
        self.counts, self.place = counts, place

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # functional collectives ask whether it is an int
        return int


class RoutedExchanges:
    """The exchanges of one trace. `is_open` returns True for tensors that depend on parameters."""

    def __init__(self, is_open: Callable[[Tensor], bool]) -> None:
        self.is_open = is_open
        self.rows = WeakTensorKeyDictionary()  # of the tensors that counts divide among ranks

    def numbers(self, counts: Tensor) -> "list[RoutedCount] | None":
        """Returns stand-ins for the numbers of a list that an all-to-all may take; None for other
        tensors."""
        is_list = counts.ndim == 1 and not counts.is_floating_point() and not counts.is_complex()
        if is_list and torch.distributed.is_available() and torch.distributed.is_initialized():
            return [RoutedCount(counts, place) for place in range(counts.shape[0])]
        return None

    def result(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The result of a call; NotImplemented if it does not deal with such numbers."""
        if function in _REPEATS and kwargs.get("output_size") is not None:
            return self._repeated(*args, **kwargs)
        if (
            getattr(function, "__name__", "") == "all_to_all_single"
            and len(args) == 4
            and _are_routed(args[2])
        ):
            return self._exchanged(*args)
        return NotImplemented

    def _exchanged(self, rows: Tensor, output_sizes: Any, input_sizes: Any, group: str) -> Any:
        """Exchanges rows. Rows that return after an exchange are as many as were sent in it."""
        if not _are_routed(output_sizes):
            return NotImplemented
        sent, arriving = input_sizes[0].counts, output_sizes[0].counts
        count = self.rows.get(arriving, len(input_sizes) * rows.shape[0])
        self.rows[sent], self.rows[arriving] = rows.shape[0], count
        return exchange_rows(rows, sent, arriving, count, group)

    def _repeated(
        self, first: Tensor, repeats: Any = None, dim: int | None = None, *, output_size: Any
    ) -> Any:
        """`repeat_interleave` to a number of rows that may be more than the repeats: the last value
        fills them."""
        counts, values = (first, None) if repeats is None else (repeats, first)
        if not (
            isinstance(counts, Tensor) and isinstance(output_size, int) and self.is_open(counts)
        ):
            return NotImplemented
        if values is not None and (values.ndim != 1 or values.requires_grad):
            return NotImplemented
        ends, numbers = counts.cumsum(0), torch.arange(output_size, device=counts.device)
        positions = torch.searchsorted(ends, numbers, right=True).clamp(max=counts.shape[0] - 1)
        return positions if values is None else values[positions]


def _are_routed(sizes: Any) -> bool:
    """Returns True if a list has all numbers of one tensor, in order."""
    kinds = [type(size) is RoutedCount for size in sizes or ()]
    if not any(kinds) or not all(kinds):
        return False
    counts = sizes[0].counts
    return all(size.counts is counts and size.place == at for at, size in enumerate(sizes)) and len(
        sizes
    ) == len(counts)
