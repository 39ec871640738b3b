"""Bytes of the gradients of parameters and of their optimizer state, which replicas may divide."""

from dataclasses import dataclass

import torch

from zbcompile.passes.compile_options import HALF


@dataclass(frozen=True)
class ReplicaSharding:
    """How many replicas hold the same parameters, and what they divide: as `zero` of
    `pipe.optimizer`."""

    replicas: int = 1
    zero: int = 0

    @property
    def state_parts(self) -> int:
        """Into how many parts the optimizer's state is divided."""
        return self.replicas if self.zero else 1


ALONE = ReplicaSharding()


def gradient_bytes(value: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes of a parameter's gradients, which are summed in `dtype`."""
    return value.numel() * dtype.itemsize


def state_bytes(value: torch.Tensor, optimizer_state: float) -> float:
    """What the optimizer holds of a parameter, with the float32 master of one in half precision."""
    if value.dtype in HALF:
        return value.numel() * 4 * (1 + optimizer_state)
    return value.nbytes * optimizer_state
