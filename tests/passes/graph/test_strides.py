"""Copies keep the strides of what they copy."""

import pytest
import torch
from torch import Tensor

from zbcompile.passes.graph.strides import copy_with_strides


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).view(4, 6)[1:, ::2],
        torch.arange(3.0).expand(2, 3),
        torch.tensor(1.5),
        torch.empty(0, 3),
    ],
    ids=["dense", "permuted", "gaps", "broadcast", "scalar", "empty"],
)
def test_copies_keep_their_strides(value: Tensor) -> None:
    copy = copy_with_strides(value)
    assert torch.equal(copy, value)
    assert copy.stride() == value.stride()
    assert copy.data_ptr() != value.data_ptr() or value.numel() == 0
