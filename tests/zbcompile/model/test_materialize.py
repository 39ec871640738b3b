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


class Scaled(MLP):
    """A tied weight, a buffer of the state dict, one that is in none, and a constant made in
    forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[7].weight = self.layers[0].weight  # type: ignore[union-attr]
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("table", torch.arange(WIDTH) / WIDTH, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table) * self.scale + torch.tensor([1.0, -1.0]).repeat(
            WIDTH // 2
        )


def fill(name: str, tensor: Tensor) -> None:
    values = {"scale": torch.linspace(0.5, 1.5, WIDTH), "table": torch.arange(WIDTH) / WIDTH}
    tensor.copy_(values[name]) if name in values else tensor.uniform_(-0.3, 0.3)


def on_meta(make: Any = Scaled) -> nn.Module:
    with torch.device("meta"):
        return make()  # type: ignore[no-any-return]


def pipe_of(model: nn.Module, **options: Any) -> zbcompile.Pipeline:
    options = {
        "schedule": "zb-v",
        "ranks": 2,
        "microbatches": 4,
        "loss": F.mse_loss,
        "exact": True,
    } | options
    return zbcompile.pipeline(model, **options)


def filled_by_init() -> tuple[Tensor, dict[str, Any], dict[str, Any], list[str]]:
    """Loss, gradients, the full state, and the names of what is real in this process."""
    model = on_meta()
    pipe = pipe_of(model, init=fill)
    loss = pipe.step(ROWS, target=ROWS)
    real = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not tensor.is_meta
    ]
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
    for second in shares:
        assert torch.equal(second[0], loss)
        assert_same_tensors(second[2], state, "state")
        assert set(second[3]) < set(real)
    assert set().union(*(set(second[3]) for second in shares)) == set(real)


@pytest.mark.slow
def test_a_state_dict_fills_the_share() -> None:
    """Until then a step and an evaluation are errors; a plain MLP has nothing that no state dict
    holds."""
    eager, model = MLP(), on_meta(MLP)
    pipe = pipe_of(model)
    for run in (lambda: pipe.step(ROWS, target=ROWS), lambda: pipe.eval(ROWS)):
        with pytest.raises(
            zbcompile.PipelineError,
            match=r"layers\.0\.bias.* and 12 more.*not filled.*load_state_dict",
        ):
            run()
    pipe.load_state_dict(eager.state_dict())
    loss = pipe.step(ROWS, target=ROWS)
    assert torch.equal(eager_step(eager, F.mse_loss, Batch((ROWS,), {}, ROWS), 4, 0), loss)
    assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval(ROWS), eager(ROWS))


class Plain(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def buffers_without_init() -> None:
    pipe_of(on_meta()).step(ROWS, target=ROWS)


def plain_attribute() -> None:
    pipe_of(on_meta(Plain), init=fill).step(ROWS, target=ROWS)


def init_not_callable() -> None:
    pipe_of(on_meta(), init="normal")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            buffers_without_init,
            "table: buffers on the meta device that no state dict holds.*init=fn",
        ),
        (plain_attribute, "shift: a tensor in a plain attribute.*register_buffer"),
        (init_not_callable, r"init='normal'; expected a function init\(name, tensor\)"),
    ],
)
def test_never_garbage(function: Any, message: str, pool: Pool) -> None:
    with pytest.raises(zbcompile.PipelineError, match=message) as caught:
        function()
    assert [(o.error, o.text) for o in pool.outcomes(function)] == [
        ("PipelineError", str(caught.value))
    ] * 2
