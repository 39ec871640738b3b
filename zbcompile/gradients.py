"""Where gradients go. Parameters of one stage accumulate straight into `.grad`; those that several stages train are
summed over the stages at the end of the step, in the order in which eager autograd would have added them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class Gradients:
    """The gradients of one rank during one step.

    `partial[name][stage][microbatch]` holds, for shared parameters in exact mode, one gradient per microbatch and
    stage; `sums[name, stage]` the running sum of a shared parameter's stage otherwise.
    """

    parameters: Mapping[str, nn.Parameter]
    shared: frozenset[str]
    partial: dict[tuple[str, int], dict[int, torch.Tensor]] = field(default_factory=dict)
    sums: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def buffer(self, name: str, stage: int) -> torch.Tensor:
        """The tensor that W adds into: `.grad`, made of zeros where it is None, or the stage's sum of a shared one."""
        parameter = self.parameters[name]
        if name in self.shared:
            key = (name, stage)
            if key not in self.sums:
                self.sums[key] = torch.zeros_like(parameter, requires_grad=False)
            return self.sums[key]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        return parameter.grad

    def add(self, name: str, stage: int, microbatch: int, gradient: torch.Tensor) -> None:
        """Add one microbatch's gradient as eager's AccumulateGrad does: the first becomes `.grad`, later ones add."""
        if name in self.shared:
            self.partial.setdefault((name, stage), {})[microbatch] = gradient
        else:
            accumulate(self.parameters[name], gradient)

    def waiting(self, name: str, stage: int) -> list[torch.Tensor]:
        """What this rank holds of a shared parameter for one stage: one tensor per microbatch, or one sum in all."""
        if (name, stage) in self.sums:
            return [self.sums.pop((name, stage))]
        return [gradient for _, gradient in sorted(self.partial.pop((name, stage)).items())]


def accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """`parameter.grad += gradient`, the first one becoming `.grad`; keeps the parameter's strides."""
    with torch.no_grad():
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
        elif gradient.stride() == parameter.stride():
            parameter.grad = gradient
        else:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def add_uses(later: Sequence[torch.Tensor], earlier: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sum two uses of a shared parameter, microbatch by microbatch: the later use (none at first) comes first."""
    return [first + second for first, second in zip(later, earlier, strict=True)] if later else list(earlier)


def fold(parameter: nn.Parameter, sums: Sequence[torch.Tensor]) -> None:
    """Accumulate per-microbatch sums into `.grad` in microbatch order."""
    for gradient in sums:
        accumulate(parameter, gradient)
