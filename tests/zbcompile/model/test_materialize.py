"""Models built on the meta device: each rank makes its own share real, and nothing runs on what was
never filled."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP, WIDTH, Batch, eager_step
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors, gradients_of

ROWS = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)
BUFFERS = {"scale": torch.linspace(0.5, 1.5, WIDTH), "table": torch.arange(WIDTH) / WIDTH}


class Scaled(MLP):
    """A tied weight, a buffer of the state dict, one that is in none, and a constant made in
    forward."""

    def __init__(self) -> None:
        super().__init__(4)
        self.layers[3].weight = self.layers[0].weight  # type: ignore[union-attr]
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("table", torch.arange(WIDTH) / WIDTH, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        signs = torch.tensor([1.0, -1.0]).repeat(WIDTH // 2)
        return super().forward(x + self.table) * self.scale + signs


class Plain(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def fill(name: str, tensor: Tensor) -> None:
    tensor.copy_(BUFFERS[name]) if name in BUFFERS else tensor.uniform_(-0.3, 0.3)


def made(kind: Any = Scaled, **options: Any) -> tuple[nn.Module, zbcompile.Pipeline]:
    with torch.device("meta"):
        model = kind()
    options = {"schedule": "zb-v", "ranks": 2, "microbatches": 4, "exact": True} | options
    return model, zbcompile.pipeline(model, loss=F.mse_loss, **options)


def filled_by_init() -> tuple[Tensor, dict[str, Any], dict[str, Any], set[str]]:
    """Loss, gradients, the full state, and the names of what is real in this process."""
    model, pipe = made(init=fill)
    loss = pipe.step(ROWS, target=ROWS)
    tensors = (*model.named_parameters(), *model.named_buffers())
    real = {name for name, tensor in tensors if not tensor.is_meta}
    return loss, gradients_of(pipe), pipe.state_dict(full=True), real


@pytest.mark.slow
def test_each_rank_makes_its_own_share_real(pool: Pool) -> None:
    """The same values whatever the ranks, every tensor real somewhere, no rank with all of them;
    eager's gradients."""
    loss, gradients, state, real = filled_by_init()
    eager = Scaled()
    eager.load_state_dict(state)
    assert torch.equal(eager_step(eager, F.mse_loss, Batch((ROWS,), {}, ROWS), 4, 0), loss)
    assert_same_tensors(gradients, gradients_of(eager), "gradient of")
    assert len(real) == len([*eager.named_parameters(), *eager.named_buffers()])
    shares = pool.run(filled_by_init)
    for theirs, _, whole, its_own in shares:
        assert torch.equal(theirs, loss)
        assert_same_tensors(whole, state, "state")
        assert its_own < real
    assert set().union(*(its_own for *_, its_own in shares)) == real


@pytest.mark.slow
def test_a_state_dict_fills_the_share() -> None:
    """Until then a step and an evaluation are errors; a plain MLP has nothing that no state dict
    holds."""
    eager, (_, pipe) = MLP(), made(MLP)
    refused = r"layers\.0\.bias.* and 12 more.*not filled.*load_state_dict"
    for run in (lambda: pipe.step(ROWS, target=ROWS), lambda: pipe.eval(ROWS)):
        with pytest.raises(zbcompile.PipelineError, match=refused):
            run()
    pipe.load_state_dict(eager.state_dict())
    loss = pipe.step(ROWS, target=ROWS)
    assert torch.equal(eager_step(eager, F.mse_loss, Batch((ROWS,), {}, ROWS), 4, 0), loss)
    assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval(ROWS), eager(ROWS))


@pytest.mark.parametrize(
    ("kind", "init", "message"),
    [
        (Scaled, None, "table: buffers on the meta device that no state dict holds.*init=fn"),
        (Plain, fill, "shift: a tensor in a plain attribute.*register_buffer"),
        (Scaled, "normal", r"init='normal'; expected a function init\(name, tensor\)"),
    ],
)
def test_never_garbage(kind: Any, init: Any, message: str) -> None:
    with pytest.raises(zbcompile.PipelineError, match=message):
        made(kind, init=init)[1].step(ROWS, target=ROWS)
