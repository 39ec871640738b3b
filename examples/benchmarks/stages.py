"""First, middle and last stage of a GPT and of a Llama, compiled and as eager modules, for the
split benchmarks."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.stage.stage_program import StageProgram
from zbcompile.schedules import build

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, VOCABULARY, next_byte_loss

NAMES = ("first", "middle", "last")
LAYERS = 2  # of each stage


class RMSNorm(nn.Module):
    """In plain operations, as the published models write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaBlock(nn.Module):
    """Rotary attention with half as many key heads as query heads, and a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.attention_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, self.size).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of [batch, heads, length, size]."""
    half = x.shape[-1] // 2
    places, sizes = (torch.arange(count, device=x.device) for count in (x.shape[-2], half))
    angles = torch.outer(places, 10000.0 ** (-sizes / half))
    cos, sin = (f(angles).repeat(1, 2).to(x.dtype) for f in (torch.cos, torch.sin))
    left, right = x.split(half, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Llama(nn.Module):
    """Bytes in, logits over the next byte out."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Stage:
    """One stage: its program, and equivalent eager code.

    `input` is its input (None: the tokens), `gradient` the gradient of its output (None: the
    loss's factor).
    """

    name: str
    program: StageProgram
    eager: Callable[..., Tensor]
    parameters: Mapping[str, nn.Parameter]
    inputs: Mapping[str, Tensor]
    input: Tensor | None
    gradient: Tensor | None


def make_model(kind: str, width: int, length: int) -> nn.Module:
    """A model of six layers, two for each stage."""
    heads = max(2, width // 64)
    if kind == "gpt":
        return GPT(layers=3 * LAYERS, width=width, heads=heads, length=length)
    return Llama(layers=3 * LAYERS, width=width, heads=heads)


def compile_stages(
    kind: str,
    width: int,
    length: int,
    batch: int,
    choices: CompileOptions | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Stage]:
    """The three stages, cut between layers, for microbatches of `batch` sequences."""
    torch.manual_seed(0)
    model = make_model(kind, width, length).to(device, dtype)
    tokens, targets = torch.randint(VOCABULARY, (2, batch, length), device=device).unbind()
    example = zbcompile.Example(model, (tokens,), loss=next_byte_loss, target=targets)
    choices = choices or CompileOptions(balance=tuple(f"blocks.{i}" for i in (LAYERS, 2 * LAYERS)))
    programs = compile_example(example, build("1f1b", 3, 3), choices).program.stages
    inputs = {"args[0]": tokens, "target": targets}
    value = torch.randn(batch, length, width, device=device, dtype=dtype)
    return [
        Stage(
            name=name,
            program=programs[i],
            eager=_eager(model, i, tokens, targets),
            parameters={n: p for n, p in model.named_parameters() if n in programs[i].parameters},
            inputs=inputs,
            input=value if i else None,
            gradient=None if name == "last" else torch.randn_like(value),
        )
        for i, name in enumerate(NAMES)
    ]


def _eager(model: nn.Module, index: int, tokens: Tensor, targets: Tensor) -> Callable[..., Tensor]:
    """A stage as eager code over the modules of the model."""
    blocks = nn.Sequential(*list(model.blocks)[index * LAYERS : (index + 1) * LAYERS])  # type: ignore[arg-type]
    if index == 0:
        return lambda: blocks(_embedded(model, tokens))
    if index == 1:
        return blocks
    return lambda x: next_byte_loss(model.head(model.norm(blocks(x))), targets)  # type: ignore[operator]


def _embedded(model: nn.Module, tokens: Tensor) -> Tensor:
    embedded: Tensor = model.token(tokens)  # type: ignore[operator]
    if not isinstance(model, GPT):
        return embedded
    return embedded + model.position(torch.arange(tokens.shape[1], device=tokens.device))
