"""Random numbers: one seed per step and microbatch, handed from stage to stage as generator state.

How far a generator moves depends on the shapes drawn, so a stage cannot compute where its own draws
begin; the stage before tells it. An eager run seeded by `microbatch_seed` before each microbatch's
forward draws the same numbers.

The generators of the process serve the data functions alone.
"""

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zbcompile.passes import gpu

_MASK = (1 << 64) - 1


def microbatch_seed(step: int, microbatch: int, seed: int = 0) -> int:
    """The seed of one microbatch's forward: a pure function of step (from 0), microbatch and the
    pipeline's `seed`.

    >>> import torch, zbcompile
    >>> _ = torch.manual_seed(zbcompile.microbatch_seed(step=0, microbatch=3))
    """
    mixed = 0
    for value in (
        seed,
        step,
        microbatch,
    ):  # the finaliser of splitmix64: neighbours get unrelated seeds
        mixed = (mixed + value + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed those of the CPU and of `device`, from which passes draw."""
    torch.default_generator.manual_seed(seed)
    if gpu.is_gpu(device):
        gpu.seed(device, seed)


@dataclass
class Relay:
    """Continues on a stage from the generator state at the end of the stage before.

    On CUDA the state is a seed and an offset. The seed is the microbatch's; the offset depends on
    shapes alone. Reading it synchronizes with the device, so it is read only from the first state
    that arrives, and the state after the first microbatch is sent for the others too.
    """

    device: torch.device
    offset: int | None = None
    left: torch.Tensor | None = None

    def leave(self) -> torch.Tensor:
        """The state at the end of this stage, as a tensor on its device, so that any backend can
        send it. The host does not wait for the copy."""
        state = gpu.generator_state(self.device) if self.left is None else self.left
        if gpu.is_gpu(self.device) and self.left is None:
            self.left = state = state.pin_memory().to(self.device, non_blocking=True)
        return state

    def continue_from(self, state: torch.Tensor, seed: int) -> None:
        """Continue from `state`, which has arrived for a microbatch that began with `seed`."""
        if not gpu.is_gpu(self.device):
            torch.set_rng_state(state)
            return
        if self.offset is None:
            self.offset = int(state.cpu().view(torch.int64)[1])
        gpu.set_generator(self.device, seed, self.offset)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of Python's, torch's and (if it is imported) numpy's generators."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if gpu.is_gpu(device):
        state[gpu.KIND] = gpu.generator_state(device)
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to where `random_state` was taken."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if gpu.KIND in state and gpu.is_gpu(device):
        gpu.restore_generator(device, state[gpu.KIND])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])


def seed_everything(seed: int) -> None:
    """Seed the same generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
