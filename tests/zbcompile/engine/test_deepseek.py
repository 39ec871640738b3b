"""A model after DeepSeek-V3: shared and routed experts whose router has a bias that is updated
without gradients, an auxiliary loss per layer, and a head that predicts a further token and shares
the output layer. Latent attention is among the classes of `transformers_sweep.py`."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.training import AsEager

WORDS, WIDTH, EXPERTS, LENGTH = 32, 16, 4, 6


class Block(nn.Module):
    """One shared expert next to routed ones. Tokens choose by score plus `bias`, which falls for
    busy experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("tokens", torch.zeros(EXPERTS, dtype=torch.int64))
        self.enter = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.leave = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(hidden)
        scores = self.router(x).sigmoid()
        chosen = F.one_hot((scores + self.bias).topk(2).indices, EXPERTS).sum(-2)
        weights = scores * chosen
        weights = weights / weights.sum(-1, keepdim=True)
        created = F.silu(torch.einsum("btw,ewv->btev", x, self.enter))
        routed = torch.einsum("btev,evw,bte->btw", created, self.leave, weights)
        load = chosen.sum((0, 1))
        with torch.no_grad():
            self.tokens.add_(load)  # type: ignore[operator,union-attr]
            self.bias.add_(0.05 * (load.float().mean() - load).sign())  # type: ignore[operator,union-attr]
        balance = (load / load.sum() * EXPERTS * scores.mean((0, 1))).sum()
        return hidden + self.shared(x) + routed, 0.01 * balance


class DeepSeek(nn.Module):
    """The loss of `tokens`, [rows, LENGTH + 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.join, self.ahead = nn.Linear(2 * WIDTH, WIDTH, bias=False), Block()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, total = self.embedding(tokens[:, :LENGTH]), torch.zeros(())
        for block in self.blocks:
            hidden, balance = block(hidden)
            total = total + balance
        total = total + self.loss(hidden, tokens[:, 1 : 1 + LENGTH])
        joined = torch.cat([hidden, self.embedding(tokens[:, 1 : 1 + LENGTH])], -1)
        hidden, balance = self.ahead(self.join(joined))
        return total + balance + 0.3 * self.loss(hidden, tokens[:, 2 : 2 + LENGTH])

    def loss(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), tokens.flatten())


@pytest.mark.slow
def test_bitwise() -> None:
    """With recomputation: no token is counted twice, and the bias follows the counts."""
    torch.manual_seed(0)
    model, tokens = DeepSeek(), torch.randint(WORDS, (8, LENGTH + 2))
    compared = AsEager(model, 4, None, schedule="zb-v", ranks=2, recompute="full")
    for _ in range(2):
        compared.step(tokens)
