"""A small GPT over bytes, written the ordinary way: nothing in it knows about pipelines."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token per byte


class Block(nn.Module):
    """A pre-norm transformer layer: causal attention, then a GELU MLP, each added to the residual
    stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Bytes in, logits over the next byte out: `[batch, length]` int64 -> `[batch, length,
    256]`."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        length: int = 128,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:  # logits of size 1: as an embedding, torch starts with size 1 for every entry
            nn.init.normal_(self.token.weight, std=width**-0.5)
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.token(tokens) + self.position(positions), self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
