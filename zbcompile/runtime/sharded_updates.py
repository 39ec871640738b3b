"""What a step asks of an optimizer that is divided among replicas: parameters that arrive, gradients that are
scattered, stage by stage."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch

from zbcompile.program.program import Program
from zbcompile.runtime.gradient_buffers import Gradients

Observe = Callable[[str, torch.Tensor], None]
LATE = -1  # in place of a stage: what is complete, and needed, outside of the program of a stage


class Early(Protocol):
    """An optimizer that updates stage by stage inside of a step."""

    def update(self, stage: int) -> None:
        """Update what is complete with the last W of `stage`; its gradients are summed, and in `.grad`."""
        ...

    def settle(self) -> None:
        """Correct the last update, if it was made before all that it depends on was known."""
        ...


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

    def finish(self, stage: int | None = None) -> None:
        """Wait for the sums of `stage`, or of all."""
        ...

    def sums(self) -> Mapping[str, torch.Tensor]:
        """This replica's parts of the sums, by parameter."""
        ...
