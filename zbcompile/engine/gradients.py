"""The sums of weight gradients during a step.

The graphs of B, W and BW add to them (`zbcompile.passes.stage.accumulate`); with `exact=True` this
module does. If one stage trains a parameter, its passes add straight into `.grad`, or, if the dtype
or the strides differ, into a buffer that `flush` rounds once. If several stages train it, each has
a separate sum until the end of the step (`zbcompile.engine.tied`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from zbcompile.passes.compile_options import CompileOptions


@dataclass
class GradientSum:
    """One parameter's gradient on one rank.

    Attributes:
        dtype: That of sums over microbatches.
        shared: Whether several stages train the parameter, on this rank or others.
        running: The sum, if it is not `.grad` itself.
        parts: Of a shared parameter, the gradient by stage and microbatch with `exact=True`, else
            the sum of a stage, with None for the microbatch.
    """

    parameter: nn.Parameter
    dtype: torch.dtype
    exact: bool = False
    shared: bool = False
    running: torch.Tensor | None = None
    parts: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def buffer(self, stage: int) -> torch.Tensor:
        """Returns what the passes of a stage add into; zeros at first."""
        parameter, grad = self.parameter, self.parameter.grad
        if self.shared:
            if (stage, None) not in self.parts:
                self.parts[stage, None] = self._zeros()
            return self.parts[stage, None]
        strided = grad is not None and grad.stride() != parameter.stride()
        if strided or self.dtype != grad_dtype(parameter):
            if self.running is None:
                self.running = self._zeros()
            return self.running
        if grad is None:
            grad = parameter.grad = self._zeros()
        return grad

    def _zeros(self) -> torch.Tensor:
        return torch.zeros_like(self.parameter, dtype=self.dtype, requires_grad=False)

    @property
    def dtype_of_parts(self) -> torch.dtype:
        return grad_dtype(self.parameter) if self.exact else self.dtype

    def add(self, stage: int, microbatch: int, gradient: torch.Tensor) -> None:
        """Adds one microbatch's gradient as eager does, which casts it to the dtype of `.grad`."""
        gradient = gradient.to(grad_dtype(self.parameter))
        if self.shared:
            self.parts[stage, microbatch] = gradient
        else:
            self.accumulate(gradient)

    def take_part(self, stage: int, microbatch: int | None) -> torch.Tensor:
        """Removes and returns a part; of a stage that did not train the parameter, -0.0, which
        changes no bit of what it is added to."""
        part = self.parts.pop((stage, microbatch), None)
        if part is None:
            dtype = self.dtype_of_parts
            part = torch.full_like(self.parameter, -0.0, dtype=dtype, requires_grad=False)
        return part

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Adds a gradient that is complete, of one microbatch or of all."""
        dtype = grad_dtype(self.parameter)
        if torch.promote_types(self.dtype, dtype) == dtype:
            self._add_to_grad(gradient)
        elif self.running is None:
            self.running = self._zeros().add_(gradient)
        else:
            self.running.add_(gradient)

    def _add_to_grad(self, gradient: torch.Tensor) -> None:
        """Adds to `.grad` with the parameter's strides; the first gradient becomes `.grad`."""
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
        """Returns the sum so far in its dtype, with what `.grad` was before the step."""
        if self.running is None:
            return self.parameter.grad
        if self.parameter.grad is not None:
            self.running.add_(self.parameter.grad)
            self.parameter.grad.zero_()
        return self.running

    def release(self) -> None:
        """Drops the sum, which replicas have reduced elsewhere."""
        self.running = self.parameter.grad = None

    def flush(self) -> None:
        """Adds the sum to `.grad`, rounded to its dtype once."""
        running, self.running = self.running, None
        if running is not None:
            self._add_to_grad(running)


class Gradients(dict[str, GradientSum]):
    """The sums of one rank by parameter, created at first use; all are empty between steps.

    Attributes:
        shared: The parameters of several stages.
        parts: With `exact=True` the parts of gradients that several stages compute, by name and
            microbatch.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shared: frozenset[str],
        choices: CompileOptions,
    ) -> None:
        super().__init__()
        self.parameters, self.shared, self.choices = parameters, shared, choices
        self.parts: dict[str, dict[int, torch.Tensor]] = {}

    def __missing__(self, name: str) -> GradientSum:
        parameter, choices = self.parameters[name], self.choices
        # With exact=True that of `.grad`, in which eager adds, also if it is narrower.
        like = grad_dtype(parameter) if choices.exact else parameter.dtype
        dtype = choices.dtype_of_sum(like)
        self[name] = GradientSum(parameter, dtype, choices.exact, name in self.shared)
        return self[name]

    def flush(self, names: Iterable[str] | None = None) -> None:
        """Adds the sums of `names`, or of all parameters, to `.grad`."""
        for name in list(self) if names is None else names:
            if name in self:
                self[name].flush()


def grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Returns the dtype of `.grad`: the parameter's unless `grad_dtype` (torch 2.10) is set."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype
