"""The warm-up before the first message: every pass runs once on zeros, and leaves nothing behind."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.pool import Pool

WIDTH, BUILD_SECONDS = 16, 0.3
BUILDS: dict[str, tuple[float, float]] = {}
CALLS: list[Tensor] = []  # the inputs of the operator


def build(kernel: str) -> None:
    """Builds a kernel at its first call, as a library with lazily compiled kernels does."""
    if kernel not in BUILDS:
        begin = time.monotonic()
        time.sleep(BUILD_SECONDS)
        BUILDS[kernel] = (begin, time.monotonic())


@torch.library.custom_op("warm_up::scaled", mutates_args=())
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    build("forward")
    CALLS.append(x.clone())
    return x * weight


@torch.library.custom_op("warm_up::scaled_backward", mutates_args=())
def scaled_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    build("backward")
    CALLS.append(x.clone())
    return gradient * weight, (gradient * x).sum(0)


scaled.register_fake(lambda x, weight: torch.empty_like(x))
scaled_backward.register_fake(
    lambda gradient, x, weight: (torch.empty_like(gradient), torch.empty_like(weight))
)
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
        return self.drop(self.norm(torch.tanh(self.linear(scaled(x, self.weight)))))


def pipeline(schedule: str = "zb-h1", **options: Any) -> zbcompile.Pipeline:
    torch.manual_seed(0)
    BUILDS.clear()
    model = nn.Sequential(*(Scaled() for _ in range(4)))
    return zbcompile.pipeline(
        model, schedule=schedule, microbatches=4, loss=F.mse_loss, exact=True, **options
    )


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_random_state_buffers_and_gradients_are_as_before(schedule: str) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    gradients = []
    for warm_up in (True, False):
        pipe = pipeline(schedule, ranks=2, warm_up=warm_up)
        for parameter in pipe.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        state = {name: tensor.clone() for name, tensor in pipe.model.state_dict().items()}
        generator = torch.get_rng_state()
        CALLS.clear()
        pipe.compile(x, target=x)
        assert torch.equal(torch.get_rng_state(), generator)
        assert all(torch.equal(t, state[name]) for name, t in pipe.model.state_dict().items())
        assert all(bool((p.grad == 0.5).all()) for p in pipe.parameters())
        assert bool(CALLS) == warm_up
        assert not any(call.any() for call in CALLS[:1])  # F of stage 0, on zeros
        pipe.step(x, target=x)
        assert torch.equal(torch.get_rng_state(), generator)
        gradients.append([p.grad for p in pipe.parameters()])
    assert all(map(torch.equal, *gradients))


def builds_of_first_step() -> list[dict[str, tuple[float, float]]]:
    """Returns for each rank the times between which it built its kernels."""
    x, pipe = torch.randn(8, WIDTH), pipeline()
    generator = torch.get_rng_state()
    pipe.step(x, target=x)
    assert torch.equal(torch.get_rng_state(), generator)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, BUILDS)
    return ranks


@pytest.mark.slow
def test_ranks_build_their_kernels_at_the_same_time(pool: Pool) -> None:
    first, second = pool.run(builds_of_first_step)[0]
    assert first.keys() == second.keys() == {"forward", "backward"}
    for kernel in first:
        assert max(first[kernel][0], second[kernel][0]) < min(first[kernel][1], second[kernel][1])
