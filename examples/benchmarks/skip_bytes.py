"""Bytes sent between ranks for values that several later stages read, per microbatch, in MB.

    python examples/benchmarks/skip_bytes.py

`relay` is what is sent today: each value passes through every stage between the one that makes it and the last one that
reads it, and its gradient comes back the same way. `straight` is what would be sent if each rank that reads a value got
it once from the rank that makes it, and kept it for its later stages, and if each sent one gradient back.
"""

import argparse
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from zbcompile.compiler.compile_example import compile_example
from zbcompile.model.example import Example
from zbcompile.passes.compile_options import Choices
from zbcompile.program.program import Program
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


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "U-Net": (UNet, (2, 3, 64, 64)),
    "encoder-decoder": (EncoderDecoder, (2, 32, WIDTH)),
    "residuals": (Residuals, (2, 32, WIDTH)),
}


def squares(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def reads(program: Program, stage: int, name: str) -> bool:
    """Whether a stage uses an activation that arrives, and does not only pass it on."""
    holders = program.stages[stage].pieces["F"].module.graph.find_nodes(op="placeholder")
    found = [h for h in holders if h.meta["slot"].kind == "activation" and h.meta["slot"].name == name]
    return any(user.op != "output" for holder in found for user in holder.users)


def relayed(program: Program) -> int:
    hops = [
        each for each in pairwise(program.stages) if program.rank_of(each[0].stage) != program.rank_of(each[1].stage)
    ]
    forward = sum(sender.send_bytes for sender, _ in hops)
    return forward + sum(spec.bytes for _, receiver in hops for spec in receiver.gradients_out.values())


def straight(program: Program) -> int:
    total = 0
    for maker in program.stages:
        for name, spec in maker.sends.items():
            if name in maker.receives:
                continue
            readers = [s.stage for s in program.stages if name in s.receives and reads(program, s.stage, name)]
            ranks = {program.rank_of(stage) for stage in readers} - {program.rank_of(maker.stage)}
            back = maker.gradients_in.get(name)
            total += len(ranks) * (spec.bytes + (back.bytes if back else 0))
    return total


def row(name: str, schedule: str) -> dict[str, object]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    order = build(schedule, ranks=RANKS, microbatches=MICROBATCHES)
    example = Example(make(), (x,), target=x, loss=squares)
    program = compile_example(example, order, Choices()).program
    now, then = relayed(program), straight(program)
    share = f"{then / now:.0%}"
    return {"model": name, "schedule": schedule, "relay": now / 1e6, "straight": then / 1e6, "of relay": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    rows = [row(name, schedule) for name in options.models for schedule in SCHEDULES]
    print(tabulate(rows, headers="keys", floatfmt=".3f"))


if __name__ == "__main__":
    main()
