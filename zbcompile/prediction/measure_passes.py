"""Costs by measurement: every distinct graph of a program is run on this machine, on synthetic values."""

import torch

from zbcompile.compiler.measure_nodes import mean_run_seconds
from zbcompile.compiler.synthetic_values import values_like
from zbcompile.compiler.vocabulary_sharding import with_shard_times
from zbcompile.errors import PipelineError
from zbcompile.passes.graph.process_groups import is_collective
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.torch_private import boxed
from zbcompile.program.program import Program
from zbcompile.schedules.ir.costs import Costs

PASSES = ("F", "B", "W")


def measure_passes(program: Program) -> Costs:
    """Seconds of F, B and W of every stage, of S and T of every vocabulary shard; messages are free.

    Stages that share their graphs are measured once. A pass without operations takes no time. Raises PipelineError for
    graphs with collectives, which one process cannot run.
    """
    _refuse_collectives(program)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        distinct = {stage.original: stage.pieces for stage in reversed(program.stages)}
        found = {
            index: {op: _seconds(pieces[op]) if op in pieces else 0.0 for op in PASSES}
            for index, pieces in distinct.items()
        }
        times = [found[stage.original] for stage in program.stages]
        forward, backward, weight = (tuple(stage[op] for stage in times) for op in PASSES)
        costs = Costs(forward, backward, weight)
        if program.vocabulary is None:
            return costs
        shards = [{op: _seconds(pieces[op]) for op in ("S", "T")} for pieces in program.vocabulary.pieces]
        return with_shard_times(costs, program.schedule, program.vocabulary, shards)


def _seconds(piece: Piece) -> float:
    """The time of one run. Buffers that a graph adds into grow in value from run to run, which does not change the
    time."""
    if piece.empty:
        return 0.0
    run = boxed(piece.module)
    values = [values_like(node) for node in piece.module.graph.find_nodes(op="placeholder")]

    def once() -> None:
        run(list(values))
        if values and values[0].device.type != "cpu":
            torch.accelerator.synchronize()

    return mean_run_seconds(once)


def _refuse_collectives(program: Program) -> None:
    graphs = (stage.pieces[op].module.graph for stage in program.stages for op in PASSES if op in stage.pieces)
    name = next((str(node.target) for graph in graphs for node in graph.nodes if is_collective(node)), "")
    if name:
        raise PipelineError(
            f"--costs measured: the model calls {name}, which needs other processes. Use flops, or FILE."
        )
