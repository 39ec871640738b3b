"""Shapes that depend on values of inputs: bits of eager mode if the input is static, else a
refusal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.pass_graph_runner import run_forward
from zbcompile.passes.capture.export import ExportOptions, export_forward, export_training_step
from zbcompile.passes.compile_step import compile_graph
from zbcompile.passes.errors import CaptureError

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
    lambda x, mask: x.repeat_interleave(2, dim=0),
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


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, generator=generator), torch.rand(3, 4, generator=generator) > 0.4


@pytest.mark.slow
def test_results_with_a_static_mask_are_eagers() -> None:
    model, options = All(*CALLS).eval(), ExportOptions(static_inputs=("args[1]",))
    for seed in range(2):
        step = export_forward(model, batch(seed), options=options)
        compiled = compile_graph(step, ranks_of=(0,), recompute="off")
        actual = run_forward(compiled, model, (batch(seed), {}, None))
        for number, (ours, theirs) in enumerate(zip(actual, model(*batch(seed)), strict=True)):
            assert torch.equal(ours, theirs), (number, seed)


class Total(All):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return super().forward(x, mask)[0].sum() * 1.0


def _export(call: Call, *static_inputs: str) -> None:
    export_training_step(
        Total(call), batch(0), {}, options=ExportOptions(static_inputs=static_inputs)
    )


def test_a_mask_of_another_shape_is_named_by_line() -> None:
    with pytest.raises(CaptureError, match=r"(?s)dependent_shapes\.py:\d+.*does not match"):
        _export(lambda x, mask: x[mask[:2]], "args[1]")
