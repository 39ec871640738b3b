"""The random generators of a process as plain values, for the data functions that draw from them.

A pipeline's own random numbers are a function of seed, step and microbatch, and need no state.
"""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of Python's, torch's and (if it is imported) numpy's generators."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to where `random_state` was taken."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def seed_everything(seed: int) -> None:
    """Seed the same generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
