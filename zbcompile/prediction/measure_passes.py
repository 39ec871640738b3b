"""Costs by measurement: every distinct graph of a program is run on this machine, on synthetic
values."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zbcompile.compiler.measure_nodes import device_of, run_seconds_in_turn, values_like
from zbcompile.compiler.vocabulary_sharding import with_shard_times
from zbcompile.errors import PipelineError
from zbcompile.passes import gpu
from zbcompile.passes.graph.process_groups import is_collective
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import boxed
from zbcompile.program.program import Program
from zbcompile.schedules.ir.costs import Costs

PASSES = ("F", "B", "W")
RETAINED = ("parameter", "buffer")  # kinds of slots that all passes of a stage share


def measure_passes(program: Program) -> Costs:
    """Seconds of F, B and W of every stage, of S and T of every vocabulary shard; messages are
    free.

    Stages that share their graphs are measured once. A pass without operations takes no time.
    Raises PipelineError for graphs with collectives, which one process cannot run.
    """
    return measured_costs(program, measure_pieces(program))


def measure_pieces(program: Program) -> dict[str, float]:
    """Seconds of the passes of each distinct stage, by "stage.pass", and of each vocabulary shard,
    by "shard rank.pass"."""
    _refuse_collectives(program)
    distinct = {str(stage.original): stage.pieces for stage in reversed(program.stages)}
    shards = enumerate(program.vocabulary.pieces) if program.vocabulary else ()
    distinct |= {f"shard {rank}": pieces for rank, pieces in shards}
    nodes = (
        node
        for pieces in distinct.values()
        for piece in pieces.values()
        for node in piece.module.graph.nodes
    )
    with gpu.forked_generators(device_of(nodes)), torch.no_grad():
        return {
            f"{name}.{op}": s
            for name, pieces in distinct.items()
            for op, s in _seconds(pieces).items()
        }


def measured_costs(program: Program, seconds: Mapping[str, float]) -> Costs:
    """The costs by what `measure_pieces` returned."""
    forward, backward, weight = (
        tuple(seconds.get(f"{stage.original}.{op}", 0.0) for stage in program.stages)
        for op in PASSES
    )
    costs = Costs(forward, backward, weight, time_unit="s")
    if program.vocabulary is None:
        return costs
    ranks = range(program.schedule.ranks)
    shards = [{op: seconds[f"shard {rank}.{op}"] for op in ("S", "T")} for rank in ranks]
    return with_shard_times(costs, program.schedule, program.vocabulary, shards)


def _seconds(pieces: Mapping[str, PassGraph]) -> dict[str, float]:
    """Seconds of the passes of a stage, run in turn: a pass that is repeated alone finds all that
    it reads in the cache, as in no step."""
    saved: dict[Slot, Any] = {}
    ops = [op for op in (*PASSES, "S", "T") if op in pieces and not pieces[op].empty]
    return dict(
        zip(ops, run_seconds_in_turn([_run_of(pieces[op], saved) for op in ops]), strict=True)
    )


def _run_of(piece: PassGraph, saved: dict[Slot, Any]) -> Callable[[], None]:
    """One run of a pass, on the parameters and buffers `saved` by its stage. Buffers that a graph
    adds into grow in value from run to run, which does not change the time."""
    run, values, device = boxed(piece.module), [], device_of(piece.module.graph.nodes)
    for slot, node in piece.arguments:
        values.append(
            saved.setdefault(slot, values_like(node))
            if slot.role in RETAINED
            else values_like(node)
        )

    def once() -> None:
        run(list(values))
        gpu.synchronize(device)

    return once


def _refuse_collectives(program: Program) -> None:
    graphs = (
        stage.pieces[op].module.graph
        for stage in program.stages
        for op in PASSES
        if op in stage.pieces
    )
    name = next(
        (str(node.target) for graph in graphs for node in graph.nodes if is_collective(node)), ""
    )
    if name:
        raise PipelineError(
            f"--costs measured: the model calls {name}, which needs other processes. Use flops, or"
            " FILE."
        )
