"""Where a weight gradient is summed during a step. W's own graph adds to it
(`zbcompile.passes.stage.accumulate`), with `exact=True` this module does. A `GradientSum` is in one
of three states:

* own: of all stages, one trains the parameter. Its passes add straight into `.grad` if that has the
  dtype of the sum and the parameter's strides, otherwise into `running`, which is rounded and added
  to `.grad` once, by `settle`;
* shared: several stages train it, on this rank or on others. What each of them adds up waits in
  `parts`, until the exchange TIE sums the parts in the order in which eager autograd adds them and
  folds the total into the own sum;
* reduced: the sum has left for the replicas, each of which keeps a part of it elsewhere; `.grad` is
  None.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import nn

from zbcompile.passes.compile_options import Choices

WHOLE = -1  # in place of a microbatch: the running sum of all


@dataclass
class GradientSum:
    """One parameter's gradient on one rank. `dtype` is that of running sums.

    `parts[stage][microbatch]` has, in exact mode, one gradient per use of a shared parameter on the
    stage, in the order in which eager adds them; otherwise `parts[stage][WHOLE]` is the stage's
    running sum.
    """

    parameter: nn.Parameter
    dtype: torch.dtype
    exact: bool = False
    shared: bool = False
    running: torch.Tensor | None = None
    parts: dict[int, dict[int, list[torch.Tensor]]] = field(default_factory=dict)

    def buffer(self, stage: int) -> torch.Tensor:
        """What W adds into: `.grad` (zeros if it was None), the running sum, or that of a shared
        parameter's stage."""
        if self.shared:
            part = self.parts.setdefault(stage, {})
            if WHOLE not in part:
                part[WHOLE] = [self._zeros()]
            return part[WHOLE][0]
        parameter = self.parameter
        grad = parameter.grad
        odd = grad is not None and grad.stride() != parameter.stride()
        if odd or self.dtype != grad_dtype(parameter):
            return self._running()
        if grad is None:
            grad = parameter.grad = self._zeros()
        return grad

    def _running(self) -> torch.Tensor:
        if self.running is None:
            self.running = self._zeros()
        return self.running

    def _zeros(self) -> torch.Tensor:
        return torch.zeros_like(self.parameter, dtype=self.dtype, requires_grad=False)

    def add(self, stage: int, microbatch: int, uses: Sequence[torch.Tensor]) -> None:
        """Add one microbatch's gradients, one per use, as eager does: each is cast to the dtype of
        `.grad`, then they are summed; the first sum becomes `.grad`, later ones add."""
        cast = [use.to(grad_dtype(self.parameter)) for use in uses]
        if self.shared:
            self.parts.setdefault(stage, {})[microbatch] = cast
        else:
            self.fold([reduce(torch.add, cast)])

    def take(self, stage: int, microbatches: Sequence[int]) -> list[list[torch.Tensor]]:
        """This rank's part of a stage: the uses of each of `microbatches`, of which `WHOLE` is
        their sum. What the stage did not train is -0.0, which changes no bit of what it is added
        to."""
        part = self.parts.pop(stage, {})
        return [part[i] if i in part else [self._nothing()] for i in microbatches]

    def _nothing(self) -> torch.Tensor:
        return torch.full_like(self.parameter, -0.0, dtype=self.dtype_of_parts, requires_grad=False)

    @property
    def dtype_of_parts(self) -> torch.dtype:
        return grad_dtype(self.parameter) if self.exact else self.dtype

    def fold(self, sums: Iterable[torch.Tensor]) -> None:
        """Accumulate gradients that are complete: of one microbatch each, or of all."""
        for gradient in sums:
            own = grad_dtype(self.parameter)
            if torch.promote_types(self.dtype, own) == own:
                self._accumulate(gradient)
            else:
                self._running().add_(gradient)

    def _accumulate(self, gradient: torch.Tensor) -> None:
        """`.grad += gradient`, the first one becoming `.grad`; keeps the parameter's strides and
        dtype."""
        parameter, dtype = self.parameter, grad_dtype(self.parameter)
        with torch.no_grad():
            if parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif gradient.stride() == parameter.stride():
                parameter.grad = gradient.to(dtype)
            else:
                parameter.grad = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                parameter.grad.copy_(gradient)

    def total(self) -> torch.Tensor | None:
        """The own sum so far, with what `.grad` held before the step, in the dtype of the sum;
        replicas sum these."""
        if self.running is None:
            return self.parameter.grad
        if self.parameter.grad is not None:
            self.running.add_(self.parameter.grad)
            self.parameter.grad.zero_()
        return self.running

    def release(self) -> None:
        """Forget the own sum, which is reduced elsewhere now."""
        self.running = self.parameter.grad = None

    def settle(self) -> None:
        """Put the own sum into `.grad`, rounded to its dtype once."""
        running, self.running = self.running, None
        if running is not None:
            self._accumulate(running)


class Gradients(dict[str, GradientSum]):
    """The sums of one rank by parameter, created at first use; a step begins and ends with empty
    ones.

    Attributes:
        shared: The parameters of several stages.
        parts: With `exact=True` the parts of gradients that several stages compute, by name and
            microbatch.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shared: frozenset[str], choices: Choices
    ) -> None:
        super().__init__()
        self.parameters, self.shared, self.choices = parameters, shared, choices
        self.parts: dict[str, dict[int, torch.Tensor]] = {}

    def __missing__(self, name: str) -> GradientSum:
        parameter, choices = self.parameters[name], self.choices
        dtype = choices.dtype_of_sum(parameter.dtype)
        self[name] = GradientSum(parameter, dtype, choices.exact, name in self.shared)
        return self[name]

    def settle(self, names: Iterable[str] | None = None) -> None:
        """Put the own sums of `names` (default: all) into `.grad`."""
        for each in (
            self.values() if names is None else [self[name] for name in names if name in self]
        ):
            if each.running is not None:
                each.settle()


def grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype of `.grad`: the parameter's, unless its `grad_dtype` says another (torch 2.10 has
    it)."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def add_uses(
    later: Sequence[torch.Tensor], earlier: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Add the uses of a stage, one at a time, to the sums of the stages behind it (none at first),
    per microbatch."""
    sums = [[total] for total in later] or [[] for _ in earlier]
    return [reduce(torch.add, [*total, *uses]) for total, uses in zip(sums, earlier, strict=True)]
