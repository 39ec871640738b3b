"""A step that compiles again says what is new since the nearest program that is kept."""

import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.drop(torch.tanh(self.layers[0](x))))


def freeze(model: Net) -> None:
    model.layers[0].requires_grad_(False)


def hook(model: Net) -> None:
    model.layers[0].register_forward_hook(lambda module, args, output: output * 2)


CHANGES: list[tuple[Callable[[Net], object], dict[str, int], str]] = [
    (
        lambda model: model.drop.eval(),
        {},
        r"for model.drop.training: True -> False \(program 2; max_shapes=8 are kept\)",
    ),
    (freeze, {}, "for gradients of model.layers.0.weight: torch.float32 -> None and 1 more "),
    (hook, {}, "for other hooks of model.layers.0 "),
    (
        lambda model: torch.autocast("cpu", torch.bfloat16),
        {},
        "for autocast: None -> torch.bfloat16 ",
    ),
    (lambda model: None, {"rows": 6}, r"for microbatches of args\[0\]\[3, 4\], target\[3, 4\] "),
    (
        lambda model: model.eval(),
        {"rows": 6},
        r"for microbatches of .* and model.training: True -> False and 4 more ",
    ),
]


@pytest.mark.mostly_slow(every=3, suite=1)
@pytest.mark.parametrize(
    ("change", "batch", "says"), CHANGES, ids=[says[:40] for *_, says in CHANGES]
)
def test_the_notice_says_what_changed(
    change: Callable[[Net], object],
    batch: dict[str, int],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Net()
    pipe = zbcompile.pipeline(model, schedule="1f1b", ranks=2, microbatches=2, loss=F.mse_loss)
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    built = change(model)
    rows = batch.get("rows", 4)
    with built if isinstance(built, torch.autocast) else nullcontext():
        pipe.step(torch.ones(rows, 4), target=torch.ones(rows, 4))
    (notice,) = [line for line in capsys.readouterr().out.splitlines() if "compiling again" in line]
    assert re.search(says, notice), notice
