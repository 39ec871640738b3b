"""How a batch becomes microbatches, and what is asked of it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP, WIDTH
from tests.support.training import assert_same_tensors, gradients_of

OPTIONS: dict[str, Any] = {"schedule": "zb-v", "ranks": 2, "microbatches": 4, "exact": True}


class Conditioned(nn.Module):
    """Takes a batch, a nested keyword, a table that belongs to all samples, and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(
        self, x: Tensor, extra: dict[str, Tensor], *, table: Tensor, scale: float = 1.0
    ) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale + extra["shift"] @ table
        return x


@pytest.mark.parametrize(
    ("wide", "split"), [(1, {}), (8, {"table": False, "args[1]": True})], ids=str
)
def test_nested_keywords_replicated_tables_and_numbers(wide: int, split: dict[str, bool]) -> None:
    """A table of one row is replicated, another one if `split=` says so, also if it is as long as
    the batch. Another number compiles again, and the first comes back."""
    model, eager = Conditioned(), Conditioned()
    x, goal, shift = torch.randn(8, WIDTH), torch.randn(8, WIDTH), torch.randn(8, wide)
    table = torch.randn(wide, WIDTH)
    pipe = zbcompile.pipeline(model, loss=F.mse_loss, split=split, **OPTIONS)
    for scale in (0.5, 1.0, 0.5):
        total = torch.zeros(())
        for part, local, target in zip(x.chunk(4), shift.chunk(4), goal.chunk(4), strict=True):
            output = eager(part, {"shift": local}, table=table, scale=scale)
            loss = F.mse_loss(output, target) / 4
            loss.backward()
            total = total + loss.detach()
        inputs: Any = {"table": table, "scale": scale, "target": goal}
        assert torch.equal(pipe.step(x, {"shift": shift}, **inputs), total)
        assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")


def mlp() -> MLP:
    torch.manual_seed(0)
    return MLP(4)


@pytest.mark.slow
def test_what_is_chosen_by_default_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The smallest admitted number of microbatches from twice the stages on, once; one rank."""
    x = torch.randn(16, WIDTH)
    pipe = zbcompile.pipeline(mlp(), schedule="zb-v", ranks=2, loss=F.mse_loss)
    for _ in range(2):
        pipe.step(x, target=x)
    assert pipe.program.schedule.microbatches == 8
    pipe = zbcompile.pipeline(mlp(), schedule="1f1b", microbatches=2, loss=F.mse_loss)
    assert pipe.compile(x, target=x).program.schedule.ranks == 1
    out = capsys.readouterr().out
    assert out.count("microbatches= not given; using 8") == 1
    assert "running as one rank" in out
