"""Models of fake tensors: shapes without memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zbcompile.passes.torch_private import FakeTensorMode, replaced
from zbcompile.torch_private import apply_to, replace_tensors


@contextmanager
def fake_models() -> Iterator[None]:
    """Context in which new tensors are fake, and `model.to(torch.bfloat16)` and `.half()` work on
    modules of them.

    torch (2.11-2.13) swaps the contents of fake parameters, which is impossible once anything
    refers to them weakly, as their initialisation does. Here a converted parameter replaces the
    former one, a tied one at every place.
    """
    # by the ids of a conversion and a parameter, which are kept so that their ids stay theirs
    converted: dict[tuple[int, int], tuple[Any, Tensor, nn.Parameter]] = {}

    def convert(
        module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        def new_parameter(parameter: nn.Parameter) -> nn.Parameter:
            key = id(fn), id(parameter)
            if key not in converted:
                with torch.no_grad():
                    new = nn.Parameter(fn(parameter), parameter.requires_grad)
                converted[key] = fn, parameter, new
            return converted[key][2]

        for child in module.children() if recurse else ():
            apply_to(child, fn)
        replace_tensors(module, new_parameter, fn)
        return module

    with replaced(nn.Module, "_apply", convert), FakeTensorMode():
        yield
