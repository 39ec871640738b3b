"""The strides that are inferred are those of the kernels, whatever the layouts of the operands."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zbcompile.passes.graph.kernel_layouts import CONTIGUOUS, ELEMENTWISE, LIKE_SECOND, kernels_layouts
from zbcompile.passes.torch_private import FakeTensorMode, arguments_of

LAYOUTS: tuple[Callable[[], Tensor], ...] = (
    lambda: torch.rand(2, 4, 17).transpose(1, 2),
    lambda: torch.rand(2, 17, 4),
    lambda: torch.rand(2, 4, 18)[..., 1:].transpose(1, 2),
    lambda: torch.rand(17, 1, 4).expand(17, 2, 4).transpose(0, 1),
    lambda: torch.rand(4, 2, 17).permute(1, 2, 0),
)
NUMBERS = {"number": 0.5, "float": 0.5, "int": 1, "bool": False, "ScalarType": torch.float32}


@pytest.mark.parametrize("operator", sorted(ELEMENTWISE | LIKE_SECOND | CONTIGUOUS, key=str), ids=str)
def test_inferred_strides_are_the_kernels(operator: Any) -> None:
    drawn = random.Random(str(operator))
    for _ in range(12):
        args = [_argument(operator, each, drawn) for each in arguments_of(operator) if not each.has_default_value()]
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in args]
        with mode, kernels_layouts():
            inferred = operator(*fakes)
        assert _strides(inferred) == _strides(operator(*args)), [_strides(each) for each in args]


def _argument(operator: Any, declared: Any, drawn: random.Random) -> Any:
    if str(declared.type) == "Tensor":
        value = drawn.choice(LAYOUTS)()
        return value > 0.5 if declared.name == "mask" else value
    return NUMBERS[str(declared.type)]


def _strides(values: Any) -> list[tuple[int, ...]]:
    tensors = values if isinstance(values, tuple) else (values,)
    return [each.stride() for each in tensors if isinstance(each, Tensor) and each.numel()]
