"""The losses of a step, which may still be in flight when `pipe.step` returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from zbcompile.torch_private import READ_SCALAR, pytree, wrapper_like


@dataclass
class Losses:
    """The losses of a step. `values` has the loss of every microbatch of all replicas, once `wait`
    has returned; without `wait` they are complete. `require` raises if they are not the losses of
    one batch; on a device it blocks until the step ends.
    """

    values: Sequence[torch.Tensor]
    wait: Callable[[], None] | None = None
    require: Callable[[], None] | None = None

    def read(self, as_numbers: bool = False) -> list[torch.Tensor]:
        """Returns every loss. With `as_numbers` the caller synchronizes with the device, so
        `require` may block too."""
        if self.wait is not None:
            self.wait()
            self.wait = None
        if self.require is not None and (as_numbers or self.values[0].is_cpu):
            self.require()
            self.require = None
        return list(self.values)

    def total(self, reduction: str) -> torch.Tensor:
        """Returns the loss of the step without blocking. If the losses are still in flight or not
        checked yet, the first use of the result waits and checks."""
        if self.wait is None and self.require is None:
            return total_loss(self.values, reduction)
        return PendingLoss(self, reduction)


def total_loss(losses: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """The step's loss: the sum over microbatches, in their order, of loss_i / m (`mean`) or of
    loss_i (`sum`)."""
    return reduce(
        torch.add, [loss / len(losses) if reduction == "mean" else loss for loss in losses]
    )


class PendingLoss(torch.Tensor):
    """A tensor that blocks on its value when an operation reads it; only `detach` does not
    block."""

    _losses: Losses
    _reduction: str
    _value: torch.Tensor | None

    @staticmethod
    def __new__(cls, losses: Losses, reduction: str) -> "PendingLoss":
        values = wrapper_like(cls, losses.values[0])
        values._losses, values._reduction, values._value = losses, reduction, None
        return values

    def __init__(self, losses: Losses, reduction: str) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:
            return args[0]  # it has no graph
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        is_read = func is READ_SCALAR or str((kwargs or {}).get("device")) == "cpu"
        args, kwargs = pytree.tree_map_only(
            PendingLoss, partial(_value_of, is_read), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _value_of(as_numbers: bool, loss: PendingLoss) -> torch.Tensor:
    fields = loss.__dict__
    values = fields["_losses"].read(as_numbers)
    if fields["_value"] is None:
        fields["_value"] = total_loss(values, fields["_reduction"])
    return fields["_value"]  # type: ignore[no-any-return]
