"""The warm-up before the first message: every pass runs once on zeros, so that ranks build their
kernels at the same time, and leaves nothing behind."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.training import assert_same_tensors, gradients_of

WIDTH = 16
CALLS: list[tuple[str, Tensor]] = []  # of the operator, with its input


@torch.library.custom_op("warm_up::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    CALLS.append(("forward", x.clone()))
    return x * weight


@torch.library.custom_op("warm_up::scaled_backward", mutates_args=())
def scaled_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    CALLS.append(("backward", x.clone()))
    return gradient * weight, (gradient * x).sum(0)


scaled.register_fake(lambda x, weight: torch.empty_like(x))
scaled_backward.register_fake(lambda g, x, w: (torch.empty_like(g), torch.empty_like(w)))
scaled.register_autograd(
    lambda ctx, g: scaled_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Scaled(nn.Module):
    """A layer with the operator, random numbers and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(torch.tanh(self.linear(scaled(x, self.weight)))))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_every_pass_runs_and_random_state_buffers_and_gradients_are_as_before() -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    gradients = []
    for warm_up in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(Scaled() for _ in range(4)))
        options = {"schedule": "zb-h1", "ranks": 2, "microbatches": 4, "exact": True}
        pipe = zbcompile.pipeline(model, loss=F.mse_loss, warm_up=warm_up, **options)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        generator = torch.get_rng_state()
        CALLS.clear()
        pipe.compile(x, target=x)
        names = [name for name, _ in CALLS]
        assert (names.count("forward"), names.count("backward")) == (4 * warm_up, 4 * warm_up)
        assert not any(value.any() for _, value in CALLS[:1])  # F of stage 0, on zeros
        assert torch.equal(torch.get_rng_state(), generator)
        assert_same_tensors(model.state_dict(), state, "state dict:")
        assert all(bool((p.grad == 0.5).all()) for p in pipe.parameters())  # type: ignore[union-attr]
        pipe.step(x, target=x)
        assert torch.equal(torch.get_rng_state(), generator)
        gradients.append(gradients_of(pipe))
    assert_same_tensors(*gradients, "gradient of")
