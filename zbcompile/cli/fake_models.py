"""Models of fake tensors: shapes without memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.passes.torch_private import FakeTensorMode
from zbcompile.torch_private import replace_tensors


@contextmanager
def fake_models() -> Iterator[None]:
    """Context in which new tensors are fake, and `model.to(torch.bfloat16)` and `.half()` work on
    modules of them."""
    original, converted = nn.Module._apply, _Converted()
    nn.Module._apply = converted.convert  # type: ignore[method-assign, assignment]
    try:
        with FakeTensorMode():
            yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


class _Converted:
    """torch (2.11-2.13) swaps the contents of fake parameters, which is impossible once anything
    refers to them weakly, as their initialisation does. Here a converted parameter replaces the
    former one, a tied one at every place.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[int, int], tuple[Any, Tensor, nn.Parameter]] = {}

    @property
    def convert(self) -> Callable[..., nn.Module]:
        def _apply(
            module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
        ) -> nn.Module:
            for child in module.children() if recurse else ():
                child._apply(fn)
            replace_tensors(module, lambda parameter: self._of(parameter, fn), fn)
            return module

        return _apply

    def _of(self, parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
        """The key's objects are kept, so that their ids stay theirs."""
        key = id(fn), id(parameter)
        if key not in self.made:
            with torch.no_grad():
                self.made[key] = fn, parameter, nn.Parameter(fn(parameter), parameter.requires_grad)
        return self.made[key][2]
