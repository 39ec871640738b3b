"""Prints the bytes that wait from B to W, for stages of two layers, in MB per microbatch.

    python examples/benchmarks/split_bytes.py

`operands`: input and output gradient of every product with a parameter, by storage: what any W must
have. `kept`: what waits between B and W in our split, `torch` what eager's autograd graph and the
output gradients hold after stage_backward_input of torch.distributed.pipelining. F..B: what waits
between F and B. Parameters and tokens are not counted: they are there anyway.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from weakref import WeakSet

import torch
from tabulate import tabulate
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input
from tqdm import tqdm

from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.cost.node_cost import node_flops
from zbcompile.passes.graph.fx import tensors_of
from zbcompile.passes.graph.storage import storage_bytes
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import storage_key

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.stages import LAYERS, Stage, compile_stages

SHAPES = ((128, 64, 4), (256, 128, 4), (256, 512, 2), (512, 128, 1))
CUTS = tuple(f"blocks.{i}" for i in (LAYERS, 2 * LAYERS))


class LiveStorage:
    """A tensor that autograd holds; freed when autograd releases it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def torch_keeps(stage: Stage) -> int | None:
    """Bytes that torch's split holds between its two halves; None for a first stage, which it does
    not split."""
    if stage.input is None:
        return None
    storages: WeakSet[LiveStorage] = WeakSet()

    def pack(tensor: Tensor) -> LiveStorage:
        value = LiveStorage(tensor)
        storages.add(value)
        return value

    arrived = stage.input.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value.tensor):
        output = stage.eager(arrived)
        gradients = None if stage.gradient is None else [stage.gradient]
        _, groups = stage_backward_input(
            [output], gradients, [arrived], iter(stage.parameters.values())
        )
    gradients = [g for group in groups for grads in group["grads"] for g in grads if g is not None]
    free = {storage_key(t) for t in (*stage.parameters.values(), *stage.inputs.values())}
    return storage_bytes([*(value.tensor for value in storages), *gradients], free)


def operands(piece: PassGraph) -> int:
    """Bytes of the storages that W's products (and the gradients of embeddings) read."""
    products = [
        node
        for node in piece.module.graph.nodes
        if node_flops(node) or "embedding" in str(node.target)
    ]
    there = [
        node.meta["val"]
        for slot, node in zip(piece.inputs, piece.placeholders, strict=True)
        if slot.role in ("parameter", "batch", "constant")
    ]
    read = [
        t
        for node in products
        for argument in node.all_input_nodes
        for t in tensors_of(argument.meta["val"])
    ]
    return storage_bytes(read, {storage_key(t) for t in there})


def compare(kind: str, shape: tuple[int, int, int]) -> Iterable[dict[str, object]]:
    """A row for each stage of a model."""
    for stage in compile_stages(kind, *shape, CompileOptions(exact=True, balance=CUTS)):
        needed, crossing = operands(stage.program.pieces["W"]), stage.program.crossing
        eager = torch_keeps(stage)
        yield {
            "model": kind,
            "d, T, batch": ", ".join(map(str, shape)),
            "stage": stage.name,
            "operands": needed / 1e6,
            "kept": crossing.residue / 1e6,
            "kept / operands": crossing.residue / needed,
            "torch": None if eager is None else eager / 1e6,
            "F..B": crossing.kept / 1e6,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", type=int, default=len(SHAPES), help="how many shapes (default: all %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = list(itertools.product(("gpt", "llama"), SHAPES[: options.shapes]))
    rows = [row for kind, shape in tqdm(cases, unit="model") for row in compare(kind, shape)]
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3f"))


if __name__ == "__main__":
    main()
