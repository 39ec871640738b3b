"""How a model's stages are compiled, where there is a choice."""

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "hints", "selective", "full"] | int
RECOMPUTE_POLICIES = ("none", "hints", "selective", "full")

Balance = str | tuple[str, ...]
BALANCES = ("flops", "measured", "parameters")


@dataclass(frozen=True)
class Choices:
    """The keywords of `zbcompile.pipeline` that change the graphs; see there."""

    exact: bool = False
    recompute: Recompute = "hints"
    balance: Balance = "flops"
    boundary_bytes: int | None = None
    memory: int | None = None
    optimizer_state: float = 2.0
