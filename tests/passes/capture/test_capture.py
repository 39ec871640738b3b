"""Models whose forward does unusual things: loss, gradients and buffers have eager's bits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.support.training import AsEager

WIDTH = 6


def residual(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + torch.tanh(layer(x))
    return x


class Layers(nn.Module):
    """Linear layers; the functions below are what forward does."""

    def __init__(self, function: Callable[..., Any] = residual) -> None:
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)

    def buffers_of_zeros(self, *names: str) -> "Layers":
        for name in names:
            self.register_buffer(name, torch.zeros(2, WIDTH))
        return self


def rows() -> Tensor:
    return torch.randn(8, WIDTH)


def compared(model: nn.Module, schedule: str = "1f1b", loss: Any = F.mse_loss) -> AsEager:
    return AsEager(model, 4, loss, schedule=schedule, ranks=2)


# Inputs and outputs


@dataclasses.dataclass
class Outputs:
    loss: Tensor | None
    rows: Tensor
    nothing: Tensor | None = None


@pytest.mark.slow
def test_outputs_in_a_class() -> None:
    """The loss is found in them, and evaluation returns them as they are."""

    def forward(model: nn.Module, x: Tensor, *, mask: Tensor, labels: Tensor) -> Any:
        x = residual(model, x).masked_fill(mask, 0.0)
        return Outputs(F.mse_loss(x, labels), x)

    both = compared(Layers(forward), loss=None)
    batch = {"mask": rows() > 0.5, "labels": rows()}
    both.step(x := rows(), **batch)
    actual, expected = both.pipe.eval(x, **batch), both.eager.eval()(x, **batch)
    assert type(actual) is type(expected)
    torch.testing.assert_close(actual.loss, expected.loss)


@pytest.mark.slow
def test_inputs_with_gaps_keep_their_strides() -> None:
    both = compared(
        Layers(lambda m, x: residual(m, x.t().reshape(-1, 6) if x.stride(0) == 1 else x))
    )
    for case in (torch.randn(8, 2 * WIDTH)[:, ::2], torch.randn(WIDTH, 8).t()):
        both.step(case, target=rows())


# What forward may do


def buffers() -> nn.Module:
    """Buffers changed in place, by row, by assignment and by an input, and views of them."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        before = self.rows[0]
        x = torch.tanh(self.layers[0](x) + before)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.rows[0] = x.detach().amax(0)
        self.last = 0.5 * self.last + x.detach().amin(0)
        x = x - self.mean.sum(0) * self.rows.sum(0) + self.last.mean(0)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        x = x + self.seen.mean(0)
        self.seen.copy_(x.detach()[:2])
        return x + before

    return Layers(forward).buffers_of_zeros("mean", "rows", "last", "seen")


def dtypes() -> nn.Module:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x)).double()
        x = torch.tanh(self.layers[1](x)).bfloat16()
        return self.layers[3](torch.tanh(self.layers[2](x)).float())

    model = Layers(forward)
    model.layers[1].double()
    model.layers[2].bfloat16()
    return model


def draws(self: nn.Module, x: Tensor) -> Tensor:
    x = F.dropout(F.dropout(self.layers[0](x), 0.3), 0.0)
    x = F.alpha_dropout(torch.tanh(self.layers[1](x)), 0.3, True)
    x = (
        self.layers[2](x.clone()) * x
        + torch.rand_like(x)
        + torch.bernoulli(torch.full_like(x, 0.3))
    )
    noise = torch.empty_like(x).normal_()
    return F.dropout1d(self.layers[3](x).unsqueeze(1), 0.5).squeeze(1) * noise


def flexible(self: nn.Module, x: Tensor) -> Tensor:
    """flex_attention with a block mask in a frozen part: its backward runs on GPUs only."""
    with torch.no_grad():
        q = self.layers[0](x)[:, None, :, None].expand(-1, 1, -1, 8).contiguous()
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, WIDTH, WIDTH, device="cpu")
        seen = flex_attention(q, q, q, block_mask=mask)
    return residual(self, x + seen[:, 0, :, 0])


def silent(self: nn.Module, x: Tensor) -> Tensor:
    """Regions without gradients, and one with gradients inside them."""
    with torch.inference_mode():
        seen = torch.tanh(self.layers[2](x))
    with torch.no_grad():
        scale, gate = self.layers[3](x).mean(), torch.sigmoid(self.layers[1](x))
        with torch.enable_grad():
            own = self.layers[0](x)
    for layer in self.layers[1:]:
        x = torch.tanh(layer(x)) * gate + x.detach() * scale
    return x * seen.clone() + own - 0.5 * x.data


def in_place(self: nn.Module, x: Tensor) -> Tensor:
    x = torch.tanh(self.layers[0](x).add_(1))
    y = self.layers[1](x)
    y += x
    y = self.layers[2](y)
    y[:, 2] = y[:, 0] * 2
    y[:, 3:5] = 0.5
    y.mul_(2)
    z = self.layers[3](y)
    z.masked_fill_(y > 0, 0.5)
    z[:, :2].zero_()
    z[1] = y[0].double()
    return z


def writes(self: nn.Module, x: Tensor) -> Tensor:
    """Under no_grad, into a list, a diagonal, and over all of a value: a zero gradient."""
    x = self.layers[0](x)
    with torch.no_grad():
        x[:, :2].copy_(x[:, 2:4] * 2)
    y, last = self.layers[1](x), self.layers[3](x)
    torch._foreach_add_([y], [x])
    z = self.layers[2](y)
    z[:2, :2].diagonal().copy_(x[:2, :2].diagonal().sin())
    return torch.tanh(y) + z + last.zero_()


def complex_numbers(self: nn.Module, x: Tensor) -> Tensor:
    for layer in self.layers:
        frequencies = torch.fft.fft(layer(x))
        x = torch.fft.ifft(frequencies * frequencies.conj()).real + x
    turn = torch.polar(torch.ones(3), torch.arange(3.0))
    return torch.view_as_real(torch.view_as_complex(x.view(-1, 3, 2)) * turn).flatten(1)


def distributed(self: nn.Module, x: Tensor) -> Tensor:
    """Log-probabilities of a distribution, whose checks of its arguments decide by values."""
    x = residual(self, x)
    scale = F.softplus(self.layers[0](x)) + 0.1
    chosen = torch.distributions.Categorical(logits=x).entropy().unsqueeze(-1)
    return torch.distributions.Normal(x, scale).log_prob(torch.zeros_like(x)) + chosen


CASES = (buffers, dtypes, draws, flexible, silent, distributed, in_place, complex_numbers, writes)


@pytest.mark.mostly_slow(every=4, suite=2)
@pytest.mark.parametrize("made", CASES)
def test_equals_eager(made: Callable[..., Any]) -> None:
    both = compared(made() if made in (buffers, dtypes) else Layers(made), "zb-v")
    for _ in range(2):
        both.step(rows(), target=rows())


# What is said, and what is seen


@pytest.mark.parametrize("traced", [True, False])
def test_a_model_that_only_a_trace_can_follow_is_warned_of(traced: bool) -> None:
    """Forward reads activations on the other path. Its bits are those of the path for compilers."""

    def looking(model: nn.Module, x: Tensor) -> Tensor:
        guarded = torch.jit.is_tracing() if traced else torch.compiler.is_compiling()
        if traced and torch.compiler.is_compiling():  # the path that is taken last
            x = x.sin()
        looks = model.looks and not guarded
        return residual(model, -x if looks and model.layers[0](x).sum() < 9 else x)

    both, x = compared(Layers(looking)), rows()
    both.model.looks, both.eager.looks = True, False
    path = "traces" if traced else "compilers"
    with pytest.warns(UserWarning, match=f"path that it has for {path}"):
        both.pipe.compile(x, target=x)
    both.step(x, target=x)
