"""Models that use a parameter several times, as problems of the oracle."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.oracle import WIDTH, Batch, Problem

VOCABULARY, LENGTH = 24, 6


class Loop(nn.Module):
    """A residual block that is applied `uses` times, between `before` and `after` layers that are
    applied once."""

    def __init__(self, uses: int, before: int = 1, after: int = 1) -> None:
        super().__init__()
        self.uses = uses
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(before))
        self.norm, self.block = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(after))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.before:
            x = x + torch.tanh(layer(x))
        for _ in range(self.uses):
            x = x + torch.tanh(self.block(self.norm(x)))
        for layer in self.after:
            x = x + torch.tanh(layer(x))
        return x


class TransposedLoop(nn.Module):
    """A tied embedding, and a block of two layers whose first weight is read transposed as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(5):
            x = x + self.narrow(F.gelu(self.wide(x)))
        return (x @ self.wide.weight.T) @ self.embed.weight.T


class StackedWeights(nn.Module):
    """Layers whose weights are rows of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(5 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.first(x))
        for weight in self.weight.chunk(5):
            x = x + torch.tanh(x @ weight)
        return x


class SharedScale(nn.Module):
    """Layers that each have a weight of their own and read one scale twice, and a first layer
    without it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = x + torch.tanh(layer(x * self.scale) * self.scale)
        return x


class ThreeEmbeddings(nn.Module):
    """One embedding for the tokens, for their neighbours after the first layer, and for the
    logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            x = x + self.embed(tokens.roll(1, 1)) if index == 0 else x
        return x @ self.embed.weight.T


def _cast(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    return make().to(dtype)


def _rows(size: int, dtype: torch.dtype = torch.float32) -> Batch:
    return Batch((torch.randn(size, WIDTH).to(dtype),), {}, torch.randn(size, WIDTH).to(dtype))


def _tokens(size: int) -> Batch:
    tokens, target = (torch.randint(VOCABULARY, (size, LENGTH)) for _ in range(2))
    return Batch((tokens,), {}, target)


def _token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _floats(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(partial(_cast, make, dtype), F.mse_loss, partial(_rows, dtype=dtype))


# Two ranks: the block of a loop is on both of them, or on the last stage alone.
SHARED_PARAMETERS: Mapping[str, Problem] = {
    "loop-last": _floats(partial(Loop, 3, before=9, after=0)),
    "loop-10": _floats(partial(Loop, 10)),
    "loop-3-bfloat16": _floats(partial(Loop, 3), torch.bfloat16),
    "transposed-loop": Problem(TransposedLoop, _token_loss, _tokens),
    "shared-scale": _floats(SharedScale),
    "stacked-weights": _floats(StackedWeights),
    "three-embeddings": Problem(ThreeEmbeddings, _token_loss, _tokens),
}
