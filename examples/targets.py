"""Models to inspect: `python -m zbcompile.inspect examples/targets.py:gpt` (or :llama, :unet;
:llama_70b --fake)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from gpt import GPT, VOCABULARY, next_byte_loss
from llama import Llama, parallelised


def gpt() -> zbcompile.Example:
    """A byte-level GPT whose loss is a function of its output."""
    model = GPT(layers=4, width=64, length=32, dropout=0.1, tied=True)
    tokens = torch.randint(VOCABULARY, (2, 33))
    return zbcompile.Example(
        model,
        (tokens[:, :-1].contiguous(),),
        loss=next_byte_loss,
        target=tokens[:, 1:].contiguous(),
    )


def llama() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """transformers' Llama with random weights: it returns its loss, and logits next to it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    tokens = torch.randint(config.vocab_size, (2, 32))
    return LlamaForCausalLM(config), (), {"input_ids": tokens, "labels": tokens}


def llama_70b() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Llama 3 70B with sequences of 8,192 tokens, in bfloat16. Only under `--fake`: its weights
    take 141 GB."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    tokens = torch.zeros(1, 8192, dtype=torch.int64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model, (), {"input_ids": tokens, "labels": tokens}


def byte_llama(mesh: Any = None) -> zbcompile.Example:
    """The Llama of train_llama.py, on a mesh over its dimension "tp"."""
    heads, tokens = 4, torch.zeros(2, 64, dtype=torch.int64)
    model = Llama(layers=4, width=256, heads=heads, length=64)
    if mesh is not None and heads % mesh["tp"].size():
        raise ValueError(f"{heads} heads cannot be divided among {mesh['tp'].size()} ranks")
    model = model if mesh is None else parallelised(model, mesh["tp"])
    return zbcompile.Example(model, (tokens,), loss=next_byte_loss, target=tokens)


class UNet(nn.Module):
    """Two levels down and two up; each level's skip connection bypasses the stages between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.norm = nn.BatchNorm2d(2 * width)
        self.up = nn.ConvTranspose2d(4 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, noisy: Tensor, clean: Tensor) -> dict[str, Tensor]:
        fine = F.relu(self.enter(noisy))
        coarse = F.relu(self.down(fine))
        deepest = F.relu(self.norm(self.middle(coarse)))
        upper = F.relu(self.up(torch.cat([deepest, coarse], dim=1)))
        image = self.leave(torch.cat([upper, fine], dim=1))
        return {"loss": F.mse_loss(image, clean), "image": image}


def unet() -> tuple[nn.Module, tuple[Any, ...]]:
    """A small U-Net with skip connections and batch norm; the loss is one entry of its output."""
    clean = torch.randn(2, 3, 16, 16)
    return UNet(), (clean + 0.1 * torch.randn_like(clean), clean)
