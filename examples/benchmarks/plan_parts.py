"""What `python -m zbcompile.plan` estimates of one rank's part of `byte_llama` in examples/targets.py, beside the
graphs compiled for it: seconds of F, B and W, and the bytes of each rank.

    python examples/benchmarks/plan_parts.py
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1]))

from targets import byte_llama
from zbcompile import Example
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import compile_laid_out, lay_out_step
from zbcompile.compiler.prices import LinePrices
from zbcompile.model.distributed_tensors import Parts
from zbcompile.passes.compile_options import Choices, Recompute
from zbcompile.prediction.predict import predicted_costs
from zbcompile.prediction.rank_memory import rank_memories
from zbcompile.schedules import Costs, search
from zbcompile.torch_private import group_without_peers

RANKS = 2


@contextmanager
def part_of(tensor: int) -> Iterator[tuple[Example, Mapping[str, str]]]:
    """The part of the first of `tensor` ranks, and its process groups."""
    if tensor == 1:
        yield byte_llama(), MappingProxyType({})
        return
    with group_without_peers(tensor):
        mesh = init_device_mesh("cpu", (tensor,), mesh_dim_names=("tp",))
        example, labels = byte_llama(mesh), {str(mesh.get_group().group_name): "tp"}
        Parts(example.model, labels)
        yield example, labels


def compare(tensor: int, placement: str, recompute: Recompute) -> None:
    with part_of(tensor) as (example, labels):
        step, choices = (example.model, one_microbatch(example)), Choices(recompute=recompute)
        order = search(Costs.uniform(2 * RANKS if placement == "v" else RANKS), RANKS, 4, None, [placement], moves=0)
        laid_out = lay_out_step(*step, example.loss, dimensions=labels)
        program = compile_laid_out(*step, laid_out, order.schedule, choices, {})
        line = LinePrices(laid_out.canonical, laid_out.line, choices)
        edges = [after + 1 for after in program.cuts.after]
        costs, graphs = line.costs(edges), predicted_costs(program)
        tensors = dict(example.model.named_parameters()) | dict(example.model.named_buffers())
        memory, most = rank_memories(program, graphs, tensors), line.most_held(program.schedule, edges)
    times = (sum(costs.times(op)) / sum(graphs.times(op)) - 1 for op in ("F", "B", "W"))
    kept = (sum(a) / sum(b) - 1 for a, b in ((costs.activation, graphs.activation), (costs.residue, graphs.residue)))
    peaks = (held / rank.peak - 1 for held, rank in zip(most, memory, strict=True))
    name = f"tp={tensor}  {placement:6}  {recompute:4}"
    print(name, *(f"{100 * each:+8.1f}%" for each in (*times, *kept, *peaks)))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    print("estimate / graphs - 1:   F         B         W   kept for B     for W  peaks of ranks")
    for tensor in (1, 2, 4):
        for placement in ("linear", "v"):
            for recompute in ("off", "full"):
                compare(tensor, placement, recompute)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
