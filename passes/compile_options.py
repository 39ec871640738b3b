"""How a model's stages are compiled, if there is a choice."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any, Literal

import torch

from zbcompile.passes.cost.hardware import Hardware

Policy = str | int | float  # of POLICIES; bytes; a share of what is kept otherwise
POLICIES = ("off", "hints", "selective", "full")
Recompute = Policy | tuple[Policy, ...]  # of all stages alike, or of each
Balance = str | tuple[str, ...]  # "flops", or the names of all cuts
Barriers = Literal["off", "auto", 1, 2]

HALF = (torch.bfloat16, torch.float16)  # dtypes of parameters that have float32 masters
_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}


def read_bytes(value: Any) -> int:
    """Bytes from a number or a text, rounded down. As everywhere outside of memory chips, kB, MB,
    GB and TB are powers of 1000, and KiB, MiB, GiB and TiB those of 1024. Raises ValueError for
    anything else.

    >>> read_bytes("80GiB"), read_bytes("1.5 GB"), read_bytes("4096"), read_bytes(1.5e9)
    (85899345920, 1500000000, 4096, 1500000000)
    """
    if not isinstance(value, str):
        if not is_real(value) or not math.isfinite(value) or value < 0:
            raise ValueError
        return int(value)
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d{1,2})?)\s*([a-zA-Z]*)", value.strip(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise ValueError
    return int(Fraction(match[1]) * _UNITS[match[2]])


def is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """The options that change the graphs; `zbcompile.pipeline` describes them."""

    exact: bool = False
    recompute: Recompute = "hints"
    balance: Balance = "flops"
    hardware: Hardware | None = None
    memory: int | None = None
    optimizer_state: float = 2.0
    accumulate_dtype: torch.dtype | None = None
    vocab: Barriers = "off"
    pairs: str = "auto"

    def dtype_of_sum(self, parameter: torch.dtype) -> torch.dtype:
        """In which dtype the gradients of a parameter of dtype `parameter` are summed over the
        microbatches."""
        if self.accumulate_dtype is not None:
            return torch.promote_types(parameter, self.accumulate_dtype)
        return torch.float32 if parameter in HALF and not self.exact else parameter
