"""Predicts the GPTs of the zero bubble paper (arXiv 2401.10241) on A100s and prints the published
values: the times of the passes, the bubbles of the schedules, the speed-ups.

    python examples/benchmarks/published_gpts.py [NAME ...] [--hardware a100-80g]
    python -m zbcompile.inspect examples/benchmarks/published_gpts.py:gpt_1_5b --fake --hardware a100-80g --ranks 8 \\
        --microbatches 24 --schedule zb-h1 --accumulate-dtype float16 --balance
        layers.2,layers.5,...

The models are written as they ran: fp16, attention of explicit products with dropout, learned
positions, one layer fewer on the first and last rank; gradients are added up inside of the product
that makes them. Each is built of fake tensors, so it takes no memory. The profile a100-80g was
fitted to the 1.5B model alone: the share of the peak that products get to its T_W, the share of the
bandwidth and the random numbers per second to its T_F and T_B, the latency to its T_comm.
Everything else in the table is predicted.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import zbcompile
from zbcompile.cli.compile_arguments import fake_models
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.prediction.predict import predicted_costs
from zbcompile.schedules import Costs, build, simulate

# The paper names none. The script of its authors (sail-sg/zero-bubble-pipeline-parallelism,
# pretrain_zero_bubble.sh) takes a SentencePiece tokenizer, and of the usual sizes only this one
# gives the parameters that name the models, the shared embedding counted once: 14.64 and 28.29
# billion, where GPT-2's 50,304 would make the last two 14.7B and 28.4B.
VOCABULARY = 32000


class Layer(nn.Module):
    """One layer, as GPT-3 has them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = (
            self.qkv(self.before(x))
            .view(rows, length, self.heads, -1)
            .transpose(1, 2)
            .chunk(3, dim=-1)
        )
        query, key, value = parts
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        shares = F.dropout(scores.masked_fill(mask, -10000.0).softmax(-1), 0.1)
        mixed = (shares @ value).transpose(1, 2).reshape(rows, length, width)
        x = x + F.dropout(self.out(mixed), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.between(x)))), 0.1)


class PublishedGPT(nn.Module):
    """Tokens to logits."""

    def __init__(self, layers: int, heads: int, width: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.after = nn.LayerNorm(width)
        self.logits = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = F.dropout(self.tokens(tokens) + self.positions(torch.arange(length)), 0.1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.logits(self.after(x))


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def example_of(layers: int, heads: int, width: int, length: int, rows: int) -> zbcompile.Example:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return zbcompile.Example(
        PublishedGPT(layers, heads, width, length).half(), (tokens,), loss=loss, target=tokens
    )


def _published(name: str) -> zbcompile.Example:
    return example_of(*PUBLISHED[name][:3], 1024, PUBLISHED[name].rows)


def gpt_1_5b() -> zbcompile.Example:
    return _published("1.5B")


def gpt_6_2b() -> zbcompile.Example:
    return _published("6.2B")


def gpt_14_6b() -> zbcompile.Example:
    return _published("14.6B")


def gpt_28_3b() -> zbcompile.Example:
    return _published("28.3B")


class Published(NamedTuple):
    """Layers, heads, width, rows of a microbatch; ranks and microbatches; T_F, T_B, T_W and T_comm
    in ms (table 9); the bubble rates of 1F1B, ZB-H1 and ZB-H2 (table 5); samples per GPU and second
    of 1F1B, ZB-1p and ZB-2p (table 4).
    """

    layers: int
    heads: int
    width: int
    rows: int
    ranks: int
    microbatches: int
    times: tuple[float, ...]
    bubbles: tuple[float, ...]
    rates: tuple[float, ...]


# arXiv 2401.10241v1, the smallest number of microbatches of each model.
PUBLISHED = {
    "1.5B": Published(
        22,
        24,
        2304,
        6,
        8,
        24,
        (18.522, 18.086, 9.337, 0.601),
        (0.2431, 0.1585, 0.1083),
        (11.8, 12.9, 14.5),
    ),
    "6.2B": Published(
        30,
        32,
        4096,
        3,
        8,
        24,
        (29.718, 29.444, 19.927, 0.527),
        (0.2347, 0.1323, 0.0698),
        (3.5, 3.88, 4.32),
    ),
    "14.6B": Published(
        46,
        40,
        5120,
        1,
        16,
        48,
        (11.347, 11.248, 8.132, 0.377),
        (0.2552, 0.1397, 0.0672),
        (1.4, 1.61, 1.81),
    ),
    "28.3B": Published(
        62,
        48,
        6144,
        1,
        32,
        96,
        (10.419, 10.207, 7.715, 0.408),
        (0.2646, 0.1421, 0.0641),
        (0.76, 0.87, 0.99),
    ),
}
SCHEDULES = ("1f1b", "zb-h1", "zb-h2")
LIMITS = {"zb-1p": 1, "zb-2p": 2}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=list(PUBLISHED), metavar="NAME", help=", ".join(PUBLISHED)
    )
    parser.add_argument("--hardware", default="a100-80g")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in chosen.names:
        published = PUBLISHED[name]
        costs = _predicted(published, chosen.hardware)
        print(
            f"\n{name}, {published.ranks} ranks, {published.microbatches} microbatches, on"
            f" {chosen.hardware}"
        )
        rows = [
            *_times(published, costs),
            *_bubbles(published, costs),
            *_speedups(published, costs),
        ]
        print(
            tabulate(
                rows,
                ("", "predicted", "published", "off by"),
                disable_numparse=True,
                colalign=("left",),
            )
        )


def _predicted(p: Published, hardware: str) -> Costs:
    """The costs of every stage."""
    with fake_models():
        example = example_of(p.layers, p.heads, p.width, 1024, p.rows)
    stage_costs = (p.layers + 2) // p.ranks
    cuts = tuple(
        f"layers.{n}" for n in accumulate([stage_costs - 1, *[stage_costs] * (p.ranks - 2)])
    )
    choices = CompileOptions(
        balance=cuts, accumulate_dtype=torch.float16, hardware=zbcompile.Hardware.find(hardware)
    )
    program = compile_example(example, build("zb-h1", p.ranks, p.microbatches), choices).program
    return predicted_costs(program)


def _times(p: Published, costs: Costs) -> Iterator[tuple[str, ...]]:
    """The figures of a middle stage: in ms, and relative to T_F."""
    middle = p.ranks // 2
    milliseconds = [1e3 * costs.time(op, middle) for op in "FBW"] + [1e3 * costs.hop(0, 0, 1)]
    for name, now, then in zip(
        ("T_F ms", "T_B ms", "T_W ms", "T_comm ms"), milliseconds, p.times, strict=True
    ):
        yield name, f"{now:.2f}", f"{then:.2f}", f"{now / then - 1:+.1%}"
    for name, at in (("T_B : T_F", 1), ("T_W : T_F", 2)):
        now, then = milliseconds[at] / milliseconds[0], p.times[at] / p.times[0]
        yield name, f"{now:.3f}", f"{then:.3f}", f"{now / then - 1:+.1%}"


def _equal(p: Published, costs: Costs) -> Costs:
    """Every stage as the one in the middle, as the paper's own bubble rates assume."""
    middle = p.ranks // 2
    names = ("forward", "backward", "weight", "activation", "residue", "message", "saved")
    same: dict[str, Any] = {name: (getattr(costs, name)[middle],) * costs.stages for name in names}
    return replace(costs, **same)


def _bubbles(p: Published, costs: Costs) -> Iterator[tuple[str, ...]]:
    for how, stage_costs in (("equal stages", _equal(p, costs)), ("its own stages", costs)):
        for name, then in zip(SCHEDULES, p.bubbles, strict=True):
            now = simulate(build(name, p.ranks, p.microbatches), stage_costs).cost_bubble
            points = round(100 * (now - then), 1) + 0.0  # no "-0.0"
            yield f"bubble of {name}, {how}", f"{now:.4f}", f"{then:.4f}", f"{points:+.1f} points"


def _speedups(p: Published, costs: Costs) -> Iterator[tuple[str, ...]]:
    """Relative to 1F1B; without a barrier at the optimizer, as they ran."""
    limits = {name: most * p.ranks * max(costs.activation) for name, most in LIMITS.items()}
    for how, stage_costs in (("equal stages", _equal(p, costs)), ("its own stages", costs)):
        base = simulate(build("1f1b", p.ranks, p.microbatches), stage_costs).cost
        for (name, limit), rate in zip(limits.items(), p.rates[1:], strict=True):
            order = build(name, p.ranks, p.microbatches, costs=stage_costs, memory_limit=limit)
            now, then = base / simulate(order, stage_costs).cost, rate / p.rates[0]
            yield f"speed of {name}, {how}", f"{now:.3f}", f"{then:.3f}", f"{now / then - 1:+.1%}"


if __name__ == "__main__":
    main()
