"""A model after DeepSeek-V3: latent attention, shared and routed experts whose router has a bias
that is updated without gradients, an auxiliary loss per layer, and a head that predicts a further
token and shares the output layer."""

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import Batch, eager_step
from tests.support.training import AsEager

MICROBATCHES = 4
WORDS, WIDTH, HEADS, LATENT, ROTARY, EXPERTS, CHOSEN, LAYERS, AHEAD = 32, 16, 2, 8, 4, 4, 2, 2, 1
LENGTH = 6
UPDATE, BALANCE, FURTHER = 0.05, 0.01, 0.3


def rotated(x: Tensor) -> Tensor:
    """Rotary positions, along the dimension before the last."""
    angles = torch.arange(x.shape[-2])[:, None] * 10000 ** -(torch.arange(0, ROTARY, 2) / ROTARY)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.stack(turned, -1).flatten(-2)


class LatentAttention(nn.Module):
    """Queries, keys and values come from small latent vectors; one rotary key serves all heads."""

    def __init__(self) -> None:
        super().__init__()
        inner = WIDTH // HEADS
        self.query_down, self.query_norm = nn.Linear(WIDTH, LATENT, bias=False), nn.RMSNorm(LATENT)
        self.query_up = nn.Linear(LATENT, HEADS * (inner + ROTARY), bias=False)
        self.latent_down, self.latent_norm = (
            nn.Linear(WIDTH, LATENT + ROTARY, bias=False),
            nn.RMSNorm(LATENT),
        )
        self.latent_up = nn.Linear(LATENT, 2 * HEADS * inner, bias=False)
        self.out = nn.Linear(HEADS * inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = WIDTH // HEADS
        query = self._heads(self.query_up(self.query_norm(self.query_down(x))))
        latent, rotary = self.latent_down(x).split([LATENT, ROTARY], -1)
        key, value = self._heads(self.latent_up(self.latent_norm(latent))).chunk(2, -1)
        plain, turned = query.split([inner, ROTARY], -1)
        shared = rotated(rotary[:, None]).expand(-1, HEADS, -1, -1)
        query, key = torch.cat([plain, rotated(turned)], -1), torch.cat([key, shared], -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Experts(nn.Module):
    """One shared expert next to routed ones. Tokens choose by score plus `bias`, which falls for
    busy experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("tokens", torch.zeros(EXPERTS, dtype=torch.int64))
        self.enter = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.leave = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).sigmoid()
        chosen = F.one_hot((scores + self.bias).topk(CHOSEN).indices, EXPERTS).sum(-2)
        weights = scores * chosen
        weights = weights / weights.sum(-1, keepdim=True)
        hidden = F.silu(torch.einsum("btw,ewv->btev", x, self.enter))
        routed = torch.einsum("btev,evw,bte->btw", hidden, self.leave, weights)
        load = chosen.sum((0, 1))
        with torch.no_grad():
            self.tokens.add_(load)
            self.bias.add_(UPDATE * (load.float().mean() - load).sign())
        share = load / load.sum() * EXPERTS
        return self.shared(x) + routed, BALANCE * (share * scores.mean((0, 1))).sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = LatentAttention(), Experts()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.before(x))
        y, balance = self.experts(self.between(x))
        return x + y, balance


class Ahead(nn.Module):
    """Predicts one token further, from the hidden states before and the tokens in between."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.join, self.block = nn.Linear(2 * WIDTH, WIDTH, bias=False), Block()

    def forward(self, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(
            self.join(torch.cat([self.norms[0](hidden), self.norms[1](embedded)], -1))
        )


class DeepSeek(nn.Module):
    """The loss of `tokens`, [rows, LENGTH + AHEAD + 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ahead = nn.ModuleList(Ahead() for _ in range(AHEAD))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, total = self.embedding(tokens[:, :LENGTH]), torch.zeros(())
        for block in self.blocks:
            hidden, balance = block(hidden)
            total = total + balance
        total = total + self.loss(hidden, tokens, 1)
        for further, module in enumerate(self.ahead, 1):
            hidden, balance = module(hidden, self.embedding(tokens[:, further : further + LENGTH]))
            total = total + balance + FURTHER / AHEAD * self.loss(hidden, tokens, further + 1)
        return total

    def loss(self, hidden: Tensor, tokens: Tensor, further: int) -> Tensor:
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(
            logits.flatten(0, 1), tokens[:, further : further + LENGTH].flatten()
        )


def model_and_tokens() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = DeepSeek()
    return model, torch.randint(WORDS, (2 * MICROBATCHES, LENGTH + AHEAD + 1))


@pytest.mark.mostly_slow(every=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "ranks", "recompute"),
    [("zb-v", 2, "full"), ("zb-h1", 4, "off"), ("dualpipe-v", 2, "full")],
)
def test_bitwise(schedule: str, ranks: int, recompute: str) -> None:
    """With recomputation as well: no token is counted twice, and the bias follows the counts."""
    model, tokens = model_and_tokens()
    options: Any = {"schedule": schedule, "ranks": ranks, "recompute": recompute}
    compared = AsEager(model, MICROBATCHES, None, **options)
    for _ in range(2):
        compared.step(tokens)


@pytest.mark.beyond_sample
@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "vocab"), [("zb-h1", 1), ("zb-v", 2)])
def test_the_output_layer_of_two_losses_is_sharded(schedule: str, vocab: Literal[1, 2]) -> None:
    """Two steps, within the bound of sums in another order."""
    (model, tokens), (eager, _) = model_and_tokens(), model_and_tokens()
    pipe = zbcompile.pipeline(
        model, schedule=schedule, ranks=2, microbatches=MICROBATCHES, vocab=vocab
    )
    for step in range(2):
        loss = eager_step(eager, None, Batch((tokens,), {}), MICROBATCHES, step)
        torch.testing.assert_close(pipe.step(tokens), loss, rtol=2e-6, atol=0)
    assert pipe.program.vocabulary is not None
    for name, parameter in pipe.named_parameters():
        value, expected = parameter.grad, eager.get_parameter(name).grad
        assert value is not None
        assert expected is not None
        assert (value - expected).abs().max() <= 2e-6 * expected.abs().max(), name
    assert all(torch.equal(item, eager.get_buffer(name)) for name, item in model.named_buffers())
