"""Bytes of the messages of a microbatch if several later stages read a value, in MB.

    python examples/benchmarks/skip_bytes.py

With `relay` each value passes through every stage between the one that makes it and the last one that reads it, and its
gradient comes back the same way. By default a rank that reads a value gets it once, straight from a rank that has it,
keeps it for its later stages, and sends one gradient back; with `exact=True` as far as the order of additions allows.
"""

import argparse
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from zbcompile.batches.example import Example
from zbcompile.compiler.compile_example import compile_example
from zbcompile.passes.compile_options import Choices
from zbcompile.prediction.predict import count_messages
from zbcompile.schedules import build

RANKS, MICROBATCHES, LAYERS, WIDTH = 4, 8, 8, 64
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-v")


class UNet(nn.Module):
    """Each layer of the way up reads the layer of its size on the way down."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [8 << level for level in range(LAYERS // 2 + 1)]
        self.into = nn.Conv2d(3, sizes[0], 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(nn.Conv2d(a + b, a, 3, padding=1) for a, b in list(pairwise(sizes))[::-1])

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.into(x), []
        for layer in self.down:
            kept.append(x)
            x = F.relu(layer(x))
        for layer in self.up:
            x = F.relu(layer(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1)))
        return x


class EncoderDecoder(nn.Module):
    """Every layer of the decoder reads what the encoder makes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, 0.0) for _ in range(LAYERS // 2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 4, WIDTH, 0.0) for _ in range(LAYERS // 2))

    def forward(self, x: Tensor) -> Tensor:
        memory = found = x
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            found = layer(found, memory)
        return found


class Residuals(nn.Module):
    """Every layer reads the results of all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.weights = nn.ParameterList(torch.ones(i + 1) / (i + 1) for i in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer, weights in zip(self.layers, self.weights, strict=True):
            mixed = sum((value * weight for value, weight in zip(made, weights, strict=True)), torch.zeros(()))
            made.append(F.relu(layer(mixed)))
        return made[-1]


class Gated(nn.Module):
    """Every fourth layer reads which columns are the largest of what the first layer makes; no gradient goes there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        columns = x.topk(WIDTH // 4, -1).indices
        for i, layer in enumerate(self.layers[1:]):
            x = F.relu(layer(x))
            if i % 4 == 2:
                x = x.scatter(-1, columns, 0.0)
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "U-Net": (UNet, (2, 3, 64, 64)),
    "encoder-decoder": (EncoderDecoder, (2, 32, WIDTH)),
    "residuals": (Residuals, (2, 32, WIDTH)),
    "masks": (Gated, (2, 32, WIDTH)),
}


def squares(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def sent(name: str, schedule: str, choices: Choices) -> float:
    """MB of all messages of a microbatch."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    order = build(schedule, ranks=RANKS, microbatches=MICROBATCHES)
    program = compile_example(Example(make(), (x,), target=x, loss=squares), order, choices).program
    return count_messages(program).bytes / MICROBATCHES / 1e6


def row(name: str, schedule: str) -> dict[str, object]:
    relay, exact, default = (
        sent(name, schedule, choices) for choices in (Choices(relay=True), Choices(exact=True), Choices())
    )
    found = {"relay": relay, "exact": exact, "default": default, "of relay": f"{default / relay:.0%}"}
    return {"model": name, "schedule": schedule, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    rows = [row(name, schedule) for name in options.models for schedule in SCHEDULES]
    print(tabulate(rows, headers="keys", floatfmt=".3f"))


if __name__ == "__main__":
    main()
