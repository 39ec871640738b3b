"""How a model's stages are compiled, where there is a choice."""

from dataclasses import dataclass
from typing import Literal

import torch

Recompute = Literal["none", "hints", "selective", "full"] | int
RECOMPUTE_POLICIES = ("none", "hints", "selective", "full")

Balance = str | tuple[str, ...]
BALANCES = ("flops", "measured", "parameters")

Vocab = Literal["off", "auto", 1, 2]
VOCABS = ("off", "auto", 1, 2)
VocabLogits = Literal["auto", "keep", "remake"]
VOCAB_LOGITS = ("auto", "keep", "remake")


@dataclass(frozen=True)
class Choices:
    """The keywords of `zbcompile.pipeline` that change the graphs; see there."""

    exact: bool = False
    recompute: Recompute = "hints"
    balance: Balance = "flops"
    boundary_bytes: int | None = None
    memory: int | None = None
    optimizer_state: float = 2.0
    accumulate_dtype: torch.dtype | None = None
    weight_recompute: bool = False
    vocab: Vocab = "off"
    vocab_logits: VocabLogits = "auto"

    def dtype_of_sum(self, parameter: torch.dtype) -> torch.dtype:
        """In which dtype the gradients of a parameter of dtype `parameter` are summed over the microbatches."""
        if self.accumulate_dtype is not None:
            return torch.promote_types(parameter, self.accumulate_dtype)
        half = parameter in (torch.bfloat16, torch.float16)
        return torch.float32 if half and not self.exact else parameter
