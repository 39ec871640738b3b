"""A Llama-like model with torch's own tensor-parallel plans, and what one process and eager DTensor
compute."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY, WIDTH, HEADS, LENGTH, LAYERS = 13, 16, 4, 6, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x) for layer in (self.q, self.k, self.v))
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.first, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.second, self.mlp = nn.RMSNorm(WIDTH), Mlp(inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Llama(nn.Module):
    """`odd`: feed-forward layers of an odd width, and a head tied to the embedding."""

    def __init__(self, layers: int = LAYERS, odd: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(27 if odd else 28) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if odd:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def parallelised(mesh: Any, kind: str, layers: int = LAYERS) -> Llama:
    """ "plain": columns and rows; "sequence": with sequence parallelism; "loss": and the loss on
    sharded logits; "odd": uneven columns, DTensors inside of the feed-forward layers, whose output
    a style of its own gathers; a tied head.
    """
    model, split, odd = Llama(layers, kind == "odd"), kind in ("sequence", "loss"), kind == "odd"
    along, logits = Shard(1) if split else Replicate(), Shard(-1) if kind == "loss" else Replicate()
    words = RowwiseParallel(input_layouts=Replicate(), output_layouts=along)
    head = {"input_layouts": along, "output_layouts": logits, "use_local_output": kind != "loss"}
    columns, rows = ColwiseParallel(use_local_output=not odd), RowwiseParallel(output_layouts=along)
    plan: dict[str, Any] = {"embedding": words, "head": ColwiseParallel(**head)}
    plan |= {f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"blocks.*.mlp.up": columns, "blocks.*.mlp.gate": columns}
    plan |= {"blocks.*.attention.o": rows, "blocks.*.mlp.down": rows}
    if split:
        inside = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= dict.fromkeys(("blocks.*.first", "blocks.*.second", "norm"), SequenceParallel())
        plan |= dict.fromkeys(("blocks.*.attention", "blocks.*.mlp"), inside)
    if odd:
        whole = {"output_layouts": (Shard(1),), "desired_output_layouts": (Replicate(),)}
        plan["blocks.*.mlp.down"] = RowwiseParallel(output_layouts=Shard(1))
        plan["blocks.*.mlp"] = PrepareModuleOutput(**whole)
    parallelize_module(model, mesh, plan)
    if odd:
        model.head.weight = model.embedding.weight
    return model
