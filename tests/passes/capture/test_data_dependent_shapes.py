"""Shapes that depend on values of inputs: eager's bits if the input is static."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile

Call = Callable[[Tensor, Tensor], Any]


def _set(x: Tensor, mask: Tensor) -> Tensor:
    changed = 2 * x
    changed[mask.any(1)] = x[0]
    changed[mask.any(1), 1:3] = x[:1, 1:3]
    return changed


CALLS: tuple[Call, ...] = (
    lambda x, mask: x[mask],
    lambda x, mask: x[mask.any(1)],
    lambda x, mask: x[..., mask[0]],
    lambda x, mask: x[:, None, mask[0], None],
    lambda x, mask: x[mask[:, 0], mask[:1, 0].long()],
    lambda x, mask: x[mask & False],
    lambda x, mask: x.masked_select(mask[:1]),
    lambda x, mask: torch.masked_select(x[0], mask=mask),
    lambda x, mask: mask.nonzero(),
    lambda x, mask: mask.long().nonzero(as_tuple=True)[1],
    lambda x, mask: mask[0, 0].nonzero(as_tuple=True)[0],
    lambda x, mask: torch.nonzero(mask[0, 0]),
    lambda x, mask: torch.argwhere(input=mask),
    lambda x, mask: torch.where(mask)[0],
    lambda x, mask: torch.where(condition=mask, input=x, other=-x),
    lambda x, mask: torch.unique_consecutive(mask.sum(1)),
    lambda x, mask: mask.unique_consecutive(),
    lambda x, mask: x.repeat_interleave(mask.sum(1), dim=0),
    lambda x, mask: torch.repeat_interleave(x, mask.sum(), 1),
    lambda x, mask: x.repeat_interleave(mask.flatten().long()),
    lambda x, mask: torch.repeat_interleave(mask.sum(1)),
    lambda x, mask: torch.arange(mask.sum()),
    lambda x, mask: torch.arange(mask[0].sum(), mask.sum(), 2, dtype=torch.float32),
    _set,
)


class All(nn.Module):
    def __init__(self, *calls: Call) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), calls

    def forward(self, x: Tensor, mask: Tensor) -> list[Tensor]:
        return [call(self.layer(x), mask) for call in self.calls]


def pipeline(*calls: Call) -> zbcompile.Pipeline:
    return zbcompile.pipeline(All(*calls), schedule="1f1b", ranks=1, static_inputs=("args[1]",))


def test_results_with_a_static_mask_are_eagers() -> None:
    pipe = pipeline(*CALLS)
    for seed in range(2):
        torch.manual_seed(seed)
        batch = torch.randn(3, 4), torch.rand(3, 4) > 0.4
        actual, expected = pipe.eval(*batch, microbatches=1), pipe._model.eval()(*batch)
        for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert torch.equal(ours, theirs), (number, seed)


def test_a_mask_of_another_shape_is_named_by_line() -> None:
    pipe = pipeline(lambda x, mask: x[mask[:2]])
    message = r"(?s)dependent_shapes\.py:\d+.*does not match"
    with pytest.raises(zbcompile.CaptureError, match=message):
        pipe.eval(torch.randn(3, 4), torch.rand(3, 4) > 0.4, microbatches=1)
