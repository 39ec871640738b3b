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
from zbcompile.compiler.compile_model import compile_drawn, draw_step
from zbcompile.compiler.line_costs import LineCosts
from zbcompile.model.distributed_tensors import Parts
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.partition.node_costs import predicted_seconds
from zbcompile.prediction.predict import predicted_costs
from zbcompile.prediction.rank_memory import rank_memories
from zbcompile.schedules import build, simulate
from zbcompile.torch_private import group_without_peers


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


def compare(tensor: int, name: str) -> None:
    with part_of(tensor) as (example, labels):
        step = example.model, one_microbatch(example)
        drawn = draw_step(*step, example.loss, dimensions=labels)
        program = compile_drawn(*step, drawn, build(name, 2, 4), Choices(), {})
        line = LineCosts(drawn.canonical, drawn.line, predicted_seconds(drawn.line))
        edges = [after + 1 for after in program.cuts.after]
        costs, graphs = line.costs(edges), predicted_costs(program)
        tensors = dict(example.model.named_parameters()) | dict(example.model.named_buffers())
        memory = rank_memories(program, graphs, tensors)
    waiting, resident = simulate(program.schedule, costs).peak_memory, line.resident(edges, program.schedule.placement)
    for rank, held in enumerate(memory):
        times = (f"{costs.times(op)[rank] / graphs.times(op)[rank] - 1:+8.1%}" for op in ("F", "B", "W"))
        peak = (waiting[rank] + resident[rank]) / held.peak - 1
        kept = costs.activation[rank] / graphs.activation[rank] - 1
        print(f"tp={tensor}  {name:6}  rank {rank}  {'  '.join(times)}  {kept:+8.1%}  {peak:+8.1%}")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    print("estimate / compiled graphs - 1:   F         B         W    kept by F      peak")
    for tensor in (1, 2, 4):
        for name in ("1f1b", "zb-h1"):
            compare(tensor, name)


if __name__ == "__main__":
    main()
