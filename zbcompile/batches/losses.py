"""The losses of a step, which may still be in flight when `pipe.step` returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from zbcompile.torch_private import pytree, wrapper_like


@dataclass
class Losses:
    """`found` has the loss of every microbatch of all replicas, once `wait` has returned (None: they are there)."""

    found: Sequence[torch.Tensor]
    wait: Callable[[], None] | None = None

    def read(self) -> list[torch.Tensor]:
        """Every loss."""
        if self.wait is not None:
            self.wait()
            self.wait = None
        return list(self.found)

    def total(self, reduction: str) -> torch.Tensor:
        """The loss of the step, at once: if it is still in flight, its first use waits for it."""
        if self.wait is None:
            return total_loss(self.found, reduction)
        return PendingLoss(lambda: total_loss(self.read(), reduction), self.found[0])


def total_loss(losses: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """The step's loss: the sum over microbatches, in their order, of loss_i / m (`mean`) or of loss_i (`sum`)."""
    return reduce(torch.add, [loss / len(losses) if reduction == "mean" else loss for loss in losses])


class PendingLoss(torch.Tensor):
    """A tensor that waits for its value when something reads it; only `detach` does not wait."""

    _read: Callable[[], torch.Tensor]
    _value: torch.Tensor | None

    @staticmethod
    def __new__(cls, read: Callable[[], torch.Tensor], like: torch.Tensor) -> "PendingLoss":
        found = wrapper_like(cls, like)
        found._read, found._value = read, None
        return found

    def __init__(self, read: Callable[[], torch.Tensor], like: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:
            return args[0]  # it has no graph
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(PendingLoss, _value_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def _value_of(loss: PendingLoss) -> torch.Tensor:
    known = loss.__dict__
    if known["_value"] is None:
        known["_value"] = known["_read"]()
    return known["_value"]  # type: ignore[no-any-return]
