"""Models whose layers are not alike, under `schedule="auto"`: how much shorter is its step than that of interleaved
1F1B with equally many layers on each stage, and than that of the best named schedule?

    python examples/benchmarks/uneven_models.py
    python examples/benchmarks/uneven_models.py gemma-2-9b --ranks 4 --microbatches 16 --seconds 60

Simulated, by FLOPs and bytes of operations on a profile (`--hardware`), with messages over its links, within
`--memory`. The models are built of fake tensors from their published configurations:

* gemma-2-9b: 42 layers and a vocabulary of 256,000, tied, with soft-capped logits (arXiv 2408.00118).
* deepseek-v2-lite: the first of 27 layers is dense, 26 have 64 experts of which 6 compute a token, and 2 shared ones,
  behind latent attention; 102,400 words (arXiv 2405.04434). Experts choose equally many tokens, so shapes are static.
* nemotron-h-8b: 24 Mamba-2 layers, 24 MLPs and 4 of attention, in their pattern; 131,072 words (arXiv 2504.03624).

"even layers" is interleaved 1F1B with two chunks a rank, cut before layers, as equal in number as possible; "best name"
the shortest of all names on all placements, with cuts that balance FLOPs. Both take `recompute="full"` if they do not
fit without. "auto" has searched placement, cuts, recomputation, vocabulary sharding and order.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import zbcompile
from zbcompile.cli.fake_models import fake_models
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import LaidOut, lay_out_step
from zbcompile.passes.compile_options import Choices, read_bytes
from zbcompile.passes.errors import PartitionError
from zbcompile.planning.fastest_layouts import fastest_layouts
from zbcompile.planning.layouts import LayoutSearch
from zbcompile.planning.planner import PricedStep
from zbcompile.program.choice import Choice
from zbcompile.schedules import ScheduleError, build, peak_memory, simulate

NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


class Attention(nn.Module):
    """Grouped queries; positions are left out, which cost little."""

    def __init__(self, width: int, heads: int, groups: int, size: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, size
        self.qkv = nn.Linear(width, (heads + 2 * groups) * size, bias=False)
        self.out = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        query, key, value = parts.split([self.heads, self.groups, self.groups], dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Keys and values from a latent vector of each token."""

    def __init__(self, width: int, heads: int, latent: int, plain: int, rotary: int, value: int) -> None:
        super().__init__()
        self.heads, self.sizes = heads, (plain, rotary, value)
        self.query = nn.Linear(width, heads * (plain + rotary), bias=False)
        self.down = nn.Linear(width, latent + rotary, bias=False)
        self.norm, self.up = nn.RMSNorm(latent), nn.Linear(latent, heads * (plain + value), bias=False)
        self.out = nn.Linear(heads * value, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        plain, rotary, value = self.sizes
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, shared = self.down(x).split([self.norm.normalized_shape[0], rotary], dim=-1)
        keys, values = (
            self.up(self.norm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2).split([plain, value], -1)
        )
        key = torch.cat([keys, shared.unsqueeze(1).expand(-1, self.heads, -1, -1)], dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, F.pad(values, (0, plain + rotary - value)), is_causal=True)
        return self.out(mixed[..., :value].transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """An MLP with a gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Squared(nn.Module):
    """An MLP with squared ReLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Experts(nn.Module):
    """`count` experts, of which `taken` compute a token on average, beside `shared` ones that compute all."""

    def __init__(self, width: int, inner: int, count: int, taken: int, shared: int) -> None:
        super().__init__()
        self.taken, self.route = taken, nn.Linear(width, count, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(count, width, inner)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(count, inner, width))
        self.shared = Gated(width, shared * inner)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.route(tokens).softmax(dim=-1)
        weights, chosen = scores.t().topk(tokens.shape[0] * self.taken // scores.shape[1])
        own = tokens[chosen]
        made = (F.silu(own @ self.gate) * (own @ self.up)) @ self.down
        mixed = torch.zeros_like(tokens).index_add(0, chosen.flatten(), (made * weights.unsqueeze(-1)).flatten(0, 1))
        return self.shared(x) + mixed.view_as(x)


class Mamba2(nn.Module):
    """A state-space layer in its chunked form (Dao and Gu, arXiv 2405.21060, listing 1)."""

    def __init__(self, width: int, heads: int, size: int, groups: int, state: int, chunk: int) -> None:
        super().__init__()
        inner = heads * size
        self.split = [inner, inner + 2 * groups * state, heads]
        self.heads, self.groups, self.state, self.chunk = heads, groups, state, chunk
        self.enter = nn.Linear(width, sum(self.split), bias=False)
        self.mix = nn.Conv1d(self.split[1], self.split[1], 4, groups=self.split[1], padding=3)
        self.decay, self.norm = nn.Parameter(torch.zeros(heads)), nn.RMSNorm(inner)
        self.leave = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, mixed, step = self.enter(x).split(self.split, dim=-1)
        mixed = F.silu(self.mix(mixed.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        values, keys, queries = mixed.split([self.split[0], *[self.groups * self.state] * 2], dim=-1)
        made = self._scan(values, keys, queries, F.softplus(step))
        return self.leave(self.norm(made * F.silu(gate)))

    def _scan(self, values: Tensor, keys: Tensor, queries: Tensor, step: Tensor) -> Tensor:
        """Chunks apart, then the states from chunk to chunk; [rows, chunks, heads, length of a chunk, ...]."""
        rows, length, _ = values.shape
        parts = (rows, length // self.chunk, self.chunk)
        each = self.heads // self.groups
        value = (
            (values.unflatten(-1, (self.heads, -1)) * step.unsqueeze(-1)).view(*parts, self.heads, -1).transpose(2, 3)
        )
        key, query = (
            t.reshape(*parts, self.groups, self.state).repeat_interleave(each, dim=3).transpose(2, 3)
            for t in (keys, queries)
        )
        sums = (-self.decay.exp() * step).view(*parts, self.heads).transpose(2, 3).cumsum(-1)
        weights = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).exp().tril()
        inside = (query @ key.transpose(-1, -2) * weights) @ value
        states = (key * (sums[..., -1:] - sums).exp().unsqueeze(-1)).transpose(-1, -2) @ value
        total = sums[..., -1].transpose(1, 2).cumsum(-1)
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp().tril(-1)
        before = (between @ states.transpose(1, 2).flatten(3)).view_as(states.transpose(1, 2)).transpose(1, 2)
        return (inside + (query @ before) * sums.exp().unsqueeze(-1)).transpose(2, 3).reshape(rows, length, -1)


class Layer(nn.Module):
    """What is added to the residual stream, one part after the other, each behind a norm."""

    def __init__(self, width: int, *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.norms = nn.ModuleList(parts), nn.ModuleList(nn.RMSNorm(width) for _ in parts)

    def forward(self, x: Tensor) -> Tensor:
        for part, norm in zip(self.parts, self.norms, strict=True):
            x = x + part(norm(x))
        return x


class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self, words: int, width: int, layers: Iterator[nn.Module], tied: bool = False, cap: float = 0) -> None:
        super().__init__()
        self.embed, self.layers, self.norm = nn.Embedding(words, width), nn.ModuleList(layers), nn.RMSNorm(width)
        self.head, self.cap = nn.Linear(width, words, bias=False), cap
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


def gemma() -> Model:
    layers = (Layer(3584, Attention(3584, 16, 8, 256), Gated(3584, 14336)) for _ in range(42))
    return Model(256000, 3584, layers, tied=True, cap=30)


def deepseek() -> Model:
    def layer(index: int) -> Layer:
        inner = Experts(2048, 1408, 64, 6, 2) if index else Gated(2048, 10944)
        return Layer(2048, LatentAttention(2048, 16, 512, 128, 64, 128), inner)

    return Model(102400, 2048, map(layer, range(27)))


def nemotron() -> Model:
    makers: dict[str, Callable[[], nn.Module]] = {
        "M": lambda: Mamba2(4096, 128, 64, 8, 128, 128),
        "*": lambda: Attention(4096, 32, 8, 128),
        "-": lambda: Squared(4096, 21504),
    }
    return Model(131072, 4096, (Layer(4096, makers[kind]()) for kind in NEMOTRON))


MODELS = {"gemma-2-9b": gemma, "deepseek-v2-lite": deepseek, "nemotron-h-8b": nemotron}


LAYERS = {"gemma-2-9b": 42, "deepseek-v2-lite": 27, "nemotron-h-8b": len(NEMOTRON)}


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


class Step(NamedTuple):
    """Seconds of a step, bytes of the fullest rank, and what it is."""

    seconds: float
    peak: float
    what: str


def even_layers(search: LayoutSearch, layers: int) -> Step:
    """Interleaved 1F1B; the first recomputation that fits."""
    stages, prices, memory = 2 * search.ranks, search.lines["off"], search.choices.memory
    cuts = tuple(f"layers.{round(layers * stage / stages)}" for stage in range(1, stages))
    order = build("interleaved-1f1b", search.ranks, search.microbatches, chunks=2)
    named = replace(search, choices=replace(search.choices, balance=cuts))
    for recompute in search.recomputations[::-1]:
        edges = named.equal_cuts(search.layout("looped:2")) or []
        costs = prices.costs(edges, recompute=recompute)
        peak = max(map(sum, zip(peak_memory(order, costs), prices.resident(edges, order.placement), strict=True)))
        if memory is None or peak <= memory:
            break
    over = "" if memory is None or peak <= memory else ", TOO LARGE"
    return Step(float(simulate(order, costs).makespan), peak, f"recompute={recompute}{over}")


def best_name(search: LayoutSearch) -> Step:
    """With cuts that balance the FLOPs of the ranks, the output layer whole."""
    found = []
    for placement in search.placements:
        for recompute in search.recomputations:
            layout = search.layout(placement, recompute)
            try:
                choice = search.lay_out(replace(layout, edges=tuple(search.equal_cuts(layout) or ())))
            except (PartitionError, ScheduleError):
                continue
            if choice.best_name is not None:
                name, seconds = choice.best_name
                found.append(Step(seconds, 0, f"{name} on {placement}, recompute={recompute}"))
    return min(found)


def auto(search: LayoutSearch, seconds: float) -> tuple[Step, Choice]:
    choice = fastest_layouts(search, seconds)[0]
    return Step(choice.seconds, max(choice.peak), str(choice.layout)), choice


def drawn_of(name: str, length: int, choices: Choices) -> LaidOut:
    with fake_models():
        model, tokens = MODELS[name]().bfloat16(), torch.zeros(1, length, dtype=torch.int64)
    example = zbcompile.Example(model, (tokens,), loss=loss, target=tokens)
    return lay_out_step(model, one_microbatch(example), loss, choices)


def compare(name: str, options: argparse.Namespace) -> list[object]:
    begun = time.process_time()
    choices = Choices(
        vocab="auto", hardware=zbcompile.Hardware.find(options.hardware), memory=read_bytes(options.memory)
    )
    priced = PricedStep(drawn_of(name, options.length, choices), choices)
    captured = time.process_time() - begun
    search = LayoutSearch(priced.costs(options.ranks), options.ranks, options.microbatches, choices)
    even, named = even_layers(search, LAYERS[name]), best_name(search)
    found, choice = auto(search, options.seconds)
    print(
        f"{name}: captured in {captured:.0f} s, even {even.what}; best name {named.what}; auto {found.what}", flush=True
    )
    row = [even.seconds, named.seconds, found.seconds, even.seconds / found.seconds, named.seconds / found.seconds]
    return [name, *row, choice.seconds / choice.bound - 1, even.peak / 2**30, found.peak / 2**30]


HEAD = (
    "model",
    "even layers",
    "best name",
    "auto",
    "even / auto",
    "name / auto",
    "above bound",
    "GiB even",
    "GiB auto",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a microbatch (default: %(default)s)")
    parser.add_argument("--memory", default="80GiB")
    parser.add_argument("--hardware", default="h100-sxm")
    parser.add_argument("--seconds", type=float, default=40, help="of search for each model (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [compare(name, options) for name in options.models]
    print(f"{options.ranks} ranks, {options.microbatches} microbatches of {options.length} tokens, {options.hardware}")
    print(tabulate(rows, HEAD, floatfmt=("", ".3f", ".3f", ".3f", ".3f", ".3f", ".1%", ".1f", ".1f")))


if __name__ == "__main__":
    main()
