"""A byte-level Llama, and the plan by which PyTorch's own styles parallelise it over ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


class Attention(nn.Module):
    """Causal attention with rotary positions. The number of heads follows from the width of what q,
    k and v give: under tensor parallelism these are the heads of one rank."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        angles = torch.arange(length)[:, None] / 10_000 ** (
            torch.arange(0, self.size, 2) / self.size
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def rotated(self, x: Tensor) -> Tensor:
        one, second = x.chunk(2, -1)
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]  # type: ignore[index]
        return torch.cat((one * cos - second * sin, one * sin + second * cos), -1)


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.RMSNorm(width), Attention(width, heads, length)
        self.before_feed_forward, self.feed_forward = nn.RMSNorm(width), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.feed_forward(self.before_feed_forward(x))


class Llama(nn.Module):
    """From bytes `[batch, length]` to logits `[batch, length, 256]`."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads, length) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelised(model: Llama, mesh: Any) -> Llama:
    """The model over `mesh`, one dimension, in place: columns and rows, and between them parts of
    the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    parts, replicated = Shard(1), Replicate()
    inside = PrepareModuleInput(input_layouts=(parts,), desired_input_layouts=(replicated,))
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=parts)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=replicated, output_layouts=parts),
        **dict.fromkeys(
            ("blocks.*.before_attention", "blocks.*.before_feed_forward", "norm"),
            SequenceParallel(),
        ),
        **dict.fromkeys(("blocks.*.attention", "blocks.*.feed_forward"), inside),
        **dict.fromkeys(
            (f"blocks.*.{name}" for name in ("attention.q", "attention.k", "attention.v")), columns
        ),
        **dict.fromkeys((f"blocks.*.feed_forward.{name}" for name in ("up", "gate")), columns),
        **dict.fromkeys(("blocks.*.attention.o", "blocks.*.feed_forward.down"), rows),
        "head": ColwiseParallel(input_layouts=parts, output_layouts=replicated),
    }
    parallelize_module(model, mesh, plan)
    return model


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
