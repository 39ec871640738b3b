"""Models of fake tensors: shapes without memory, also for an accelerator that this machine does not
have."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zbcompile.passes.gpu import ABSENT, KIND, is_available
from zbcompile.passes.torch_private import FakeTensorMode
from zbcompile.torch_private import replace_tensors


@contextmanager
def fake_models(device: str = "cpu") -> Iterator[None]:
    """Tensors made inside are fake ones, by default on `device`, and `model.to(torch.bfloat16)`,
    `.half()` work on modules of them. An accelerator that is not there is replaced by
    `zbcompile.passes.gpu.ABSENT`.
    """
    original, converted = nn.Module._apply, _Converted()
    nn.Module._apply = converted.convert  # type: ignore[method-assign, assignment]
    try:
        absent = nullcontext() if is_available() else _WithoutAccelerator()
        with FakeTensorMode(), absent, nullcontext() if device == "cpu" else torch.device(device):
            yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


class _WithoutAccelerator(TorchFunctionMode):
    """Replaces an accelerator that is named in a call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = {name: self._instead(value) for name, value in (kwargs or {}).items()}
        if func is Tensor.cuda:
            return args[0].to(ABSENT)
        return func(*(map(self._instead, args) if func is Tensor.to else args), **keywords)

    def _instead(self, value: Any) -> Any:
        named = isinstance(value, str | torch.device) and str(value).partition(":")[0] == KIND
        return ABSENT if named else value


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
