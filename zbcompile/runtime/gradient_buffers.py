"""Where gradients accumulate. W's own graph adds to them (`zbcompile.passes.stage.accumulate`), with `exact=True` the
buffers do. Parameters of one stage accumulate straight into `.grad` if that has the dtype of the sum
and the parameter's strides, otherwise into a buffer that lives for the step and is added to `.grad` once, at its end;
those that several stages train are first summed over the stages, in the order in which eager autograd adds them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import nn

from zbcompile.passes.compile_options import Choices


@dataclass
class Gradients:
    """The gradients of one rank during one step.

    `partial[name, stage][microbatch]` holds, for shared parameters in exact mode, one gradient per use on the stage, in
    the order in which eager adds them; `sums[name, stage]` the running sum of a shared parameter's stage otherwise;
    `buffers[name]` the running sum of a parameter whose `.grad` cannot be added into. `whole` are the parameters of
    which this rank trains rows, but looks up all as an embedding: `lookups` has these gradients.
    """

    parameters: Mapping[str, nn.Parameter]
    shared: frozenset[str]
    choices: Choices
    partial: dict[tuple[str, int], dict[int, list[torch.Tensor]]] = field(default_factory=dict)
    sums: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: Mapping[str, nn.Parameter] = field(default_factory=dict)
    lookups: dict[str, torch.Tensor] = field(default_factory=dict)

    def buffer(self, name: str, stage: int) -> torch.Tensor:
        """What W adds into: `.grad` (zeros if it was None), a buffer, or the sum of a shared parameter's stage."""
        if name in self.whole and stage >= 0:
            if name not in self.lookups:
                self.lookups[name] = self._zeros(self.whole[name])
            return self.lookups[name]
        parameter = self.parameters[name]
        if name in self.shared:
            if (name, stage) not in self.sums:
                self.sums[name, stage] = self._zeros(parameter)
            return self.sums[name, stage]
        odd = parameter.grad is not None and parameter.grad.stride() != parameter.stride()
        if odd or self.choices.dtype_of_sum(parameter.dtype) != grad_dtype(parameter):
            if name not in self.buffers:
                self.buffers[name] = self._zeros(parameter)
            return self.buffers[name]
        if parameter.grad is None:
            parameter.grad = self._zeros(parameter)
        return parameter.grad

    def _zeros(self, like: nn.Parameter) -> torch.Tensor:
        return torch.zeros_like(like, dtype=self.choices.dtype_of_sum(like.dtype), requires_grad=False)

    def add(self, name: str, stage: int, microbatch: int, uses: Sequence[torch.Tensor]) -> None:
        """Add one microbatch's gradients, one per use, as eager does: each is cast to the dtype of `.grad`, then they
        are summed; the first sum becomes `.grad`, later ones add."""
        cast = [use.to(grad_dtype(self.parameters[name])) for use in uses]
        if name in self.shared:
            self.partial.setdefault((name, stage), {})[microbatch] = cast
        else:
            self._accumulate(name, reduce(torch.add, cast))

    def _accumulate(self, name: str, gradient: torch.Tensor) -> None:
        parameter = self.parameters[name]
        own = grad_dtype(parameter)
        if torch.promote_types(self.choices.dtype_of_sum(parameter.dtype), own) == own:
            accumulate(parameter, gradient)
        else:
            self.buffers.setdefault(name, self._zeros(parameter)).add_(gradient)

    def waiting(self, name: str, stage: int, microbatches: Sequence[int]) -> list[list[torch.Tensor]]:
        """This rank's gradients of a shared parameter for one stage: in exact mode the uses of each of `microbatches`,
        else one sum in all. What the stage did not train is -0.0, which changes no bit of what it is added to."""
        if (name, stage) in self.sums:
            return [[self.sums.pop((name, stage))]]
        if not self.choices.exact:
            return [[self._nothing(name)]]
        uses = self.partial.pop((name, stage), {})
        return [uses[i] if i in uses else [self._nothing(name)] for i in microbatches]

    def _nothing(self, name: str) -> torch.Tensor:
        return torch.full_like(self.parameters[name], -0.0, dtype=self.dtype_of_shared(name), requires_grad=False)

    def dtype_of_shared(self, name: str) -> torch.dtype:
        """The dtype of what `waiting` returns."""
        parameter = self.parameters[name]
        return grad_dtype(parameter) if self.choices.exact else self.choices.dtype_of_sum(parameter.dtype)

    def fold(self, name: str, sums: Sequence[torch.Tensor]) -> None:
        """Accumulate what the stages of a shared parameter sum up to, one tensor per microbatch or one in all."""
        for gradient in sums:
            self._accumulate(name, gradient)

    def whole_sum(self, name: str) -> torch.Tensor | None:
        """The gradient so far, with what `.grad` held before the step, in the dtype of the sum; replicas sum these."""
        parameter = self.parameters[name]
        if name not in self.buffers:
            return parameter.grad
        if parameter.grad is not None:
            self.buffers[name].add_(parameter.grad)
            parameter.grad.zero_()
        return self.buffers[name]

    def release(self, name: str) -> None:
        """Forget a gradient whose sum is elsewhere now."""
        self.buffers.pop(name, None)
        self.parameters[name].grad = None

    def finish(self, names: Iterable[str] | None = None) -> None:
        """Put the sums of `names` (default: all) into `.grad`, each rounded to its dtype once."""
        for name in list(self.buffers) if names is None else self.buffers.keys() & set(names):
            accumulate(self.parameters[name], self.buffers.pop(name))


def accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """`parameter.grad += gradient`, the first one becoming `.grad`; keeps the parameter's strides and dtype."""
    with torch.no_grad():
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
        elif gradient.stride() == parameter.stride():
            parameter.grad = gradient.to(grad_dtype(parameter))
        else:
            parameter.grad = torch.empty_like(parameter, dtype=grad_dtype(parameter), requires_grad=False)
            parameter.grad.copy_(gradient)


def grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    """The dtype of `.grad`: the parameter's, unless its `grad_dtype` says another (torch 2.10 has it)."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def add_uses(later: Sequence[torch.Tensor], earlier: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Add the uses of a stage, one at a time, to the sums of the stages behind it (none at first), per microbatch."""
    sums = [[total] for total in later] or [[] for _ in earlier]
    return [reduce(torch.add, [*total, *uses]) for total, uses in zip(sums, earlier, strict=True)]
