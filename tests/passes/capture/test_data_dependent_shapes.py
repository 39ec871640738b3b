"""What has as many rows as the values of inputs say: the same bits as in eager, and guards that count."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbcompile.passes.capture.export import capture, capture_inference
from zbcompile.passes.capture.guards import read_answers
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.pass_list.passes_in_order import canonicalise

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
    lambda x, mask: torch.tensor([x.max(), x[0].sum()]),
    lambda x, mask: torch.tensor([mask.sum(), mask[0].sum()], dtype=torch.float64),
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
def test_results_are_eagers_and_guards_count() -> None:
    model = All(*CALLS)
    captured = capture_inference(model, batch(0), {})
    values = dict(model.named_parameters()) | {f"args[{i}]": each for i, each in enumerate(batch(0))}
    found = captured.module(*(values.get(slot.name, captured.constants.get(slot.name)) for slot in captured.inputs))
    for number, (ours, theirs) in enumerate(zip(found, model(*batch(0)), strict=True)):
        assert torch.equal(ours, theirs), number
    assert captured.guards is not None
    mask = batch(1)[1]
    answers = read_answers(captured.guards.begin({"args[0]": batch(1)[0], "args[1]": mask}))
    assert answers[:3] == (mask.sum(), mask.any(1).sum(), mask[0].sum())
    assert len(mask.unique_consecutive()) in answers


@pytest.mark.parametrize(
    "call",
    [
        lambda x, mask: x[x > 0],
        lambda x, mask: x[mask[:2]],
        lambda x, mask: mask.sum(1).unique_consecutive(dim=0),
        lambda x, mask: x.repeat_interleave(x.argmax(1), dim=0),
        lambda x, mask: 2 * x.unsqueeze(2).repeat(1, 1, 5).tensor_split(x.flatten()[:2].argsort(), 1)[1],
    ],
    ids=["activation", "shape", "dimension", "repetitions", "place"],
)
def test_others_are_refused_by_line(call: Call) -> None:
    class Total(All):
        def forward(self, x: Tensor, mask: Tensor) -> Any:
            return super().forward(x, mask)[0].sum() * 1.0

    with pytest.raises(
        CaptureError, match=r"(?s)dependent_shapes\.py:\d+.*(depends on the data|does not match|makes a Python number)"
    ):
        canonicalise(capture(Total(call), batch(0), {}))
