"""What a step asks of an optimizer that is divided among replicas: parameters that arrive, gradients that are
scattered, stage by stage."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from zbcompile.program.program import Program
from zbcompile.runtime.gradient_buffers import Gradients

Observe = Callable[[str, torch.Tensor], None]
LATE = -1  # in place of a stage: what is complete, and needed, outside of the program of a stage


class Sharded(Protocol):
    """The parameters called `names` of this process, each updated in parts by the replicas. Every call returns at once
    but `arrive` and `finish`; the ranks that share a parameter make all of them in the same order."""

    @property
    def names(self) -> Collection[str]: ...

    def begin(self, program: Program) -> None:
        """Before a step. Raises PipelineError if its program trains other parameters."""
        ...

    def arrive(self, stage: int) -> None:
        """Wait for the values that the last update gave to the parameters of `stage`."""
        ...

    def scatter(self, stage: int, gradients: Gradients, observe: Observe) -> None:
        """Sum the gradients of `stage`, each replica its part; `.grad` becomes None. `observe` sees what this rank
        adds."""
        ...

    def finish(self) -> None:
        """Wait for the sums."""
        ...

    def sums(self) -> Mapping[str, torch.Tensor]:
        """This replica's parts of the sums, by parameter."""
        ...
