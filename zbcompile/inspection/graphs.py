"""`--graph`, `--graphs` and `--passes`: the graphs of a program, and the passes that made them."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.fx import Node

from zbcompile.compiler.compile_example import CompiledExample
from zbcompile.compiler.dump_passes import graphs_of
from zbcompile.errors import PipelineError
from zbcompile.passes.compile_step import PASSES
from zbcompile.passes.graph.fx import copy_graph, with_graph
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.torch_private import ANNOTATIONS
from zbcompile.schedules import Schedule
from zbcompile.tables import Figure, Table

PASS_LETTERS = ("F", "B", "W", "BW")


def stage_and_pass(text: str) -> tuple[int, str]:
    """The stage and pass that --graph names."""
    stage, _, name = text.partition(".")
    if not stage.isdecimal() or name.upper() not in PASS_LETTERS:
        raise PipelineError(
            f"--graph {text}: expected STAGE.PASS such as 1.B, with one of the passes"
            f" {', '.join(PASS_LETTERS)}."
        )
    return int(stage), name.upper()


def require_stage(schedule: Schedule, stage: int) -> None:
    """Raise PipelineError if the stage does not exist."""
    if not 0 <= stage < schedule.stages:
        raise PipelineError(
            f"stage {stage} does not exist: {schedule.name} on {schedule.ranks} ranks has stages 0"
            f" to {schedule.stages - 1}."
        )


def graph_text(inspected: CompiledExample, stage: int, name: str) -> str:
    """Returns one graph as torch.fx prints it, below a title and the role of each input and
    output."""
    if name not in inspected.program.stages[stage].pieces:
        raise PipelineError(
            f"--graph {stage}.{name}: the program is a forward alone, which has no {name}. Ask"
            " for F."
        )
    program, model = inspected.program.stages[stage], type(inspected.example.model).__name__
    piece = program.pieces[name]
    roles = [
        f"# in: {', '.join(map(str, piece.inputs))}",
        f"# out: {', '.join(map(str, piece.outputs))}",
    ]
    module = with_graph(piece.module, copy_graph(piece.module.graph))
    for node in module.graph.nodes:
        if (origin := origin_of(node)) and origin.file:
            line = f'File "{origin.file}", line {origin.line}'  # print_readable shows it
            node.stack_trace = f"{line}, in forward\n    {origin.code}"
        node.meta.pop(ANNOTATIONS, None)  # print_readable shows it
    title = (
        f"# {name} of stage {stage} of {model}: {program.flops[name]:,} FLOPs for one microbatch"
    )
    return "\n".join(
        [title, *roles, module.print_readable(print_output=False, include_stride=True)]
    )


def graph_table(inspected: CompiledExample, stage: int, name: str) -> Table:
    """Returns one graph: as text for a terminal, as a table of its operations for files."""
    text = graph_text(inspected, stage, name)
    graph = inspected.program.stages[stage].pieces[name].module.graph
    rows = [_operation(node) for node in graph.nodes if node.op == "call_function"]
    return Table(f"graph {stage}.{name}", rows=rows, picture=text.rstrip("\n"))


def _operation(node: Node) -> list[Figure]:
    origin = origin_of(node)
    return [
        Figure("name", node.name),
        Figure("operator", str(node.target)),
        Figure("inputs", tuple(argument.name for argument in node.all_input_nodes)),
        Figure("module", origin.owner if origin else ""),
        Figure("line", origin.text if origin else ""),
        Figure("made_by", "" if origin else "zbcompile"),
    ]


def write_graphs(inspected: CompiledExample, directory: Path) -> list[Path]:
    """Writes every graph into a separate file. Returns their paths."""
    paths = []
    for stage, program in enumerate(inspected.program.stages):
        for name in filter(program.pieces.__contains__, PASS_LETTERS):
            paths.append(directory / f"stage{stage}_{name}.py")
            paths[-1].write_text(graph_text(inspected, stage, name), encoding="utf-8")
    return paths


@dataclass
class PassTotals:
    """How often a pass ran, the operations of the graphs after it, and its seconds."""

    runs: int = 0
    operations: int = 0
    seconds: float = 0.0


class PassLog:
    """The totals of every pass by its name. Pass it to the compiler as `observe`."""

    def __init__(self) -> None:
        self.totals = {name: PassTotals() for name in PASSES}
        self._last = time.perf_counter()

    def __call__(self, name: str, artifact: Any) -> None:
        now = time.perf_counter()
        totals = self.totals[name]
        totals.runs += 1
        totals.operations += sum(
            node.op == "call_function" for graph in graphs_of(artifact) for node in graph.nodes
        )
        totals.seconds += now - self._last
        self._last = time.perf_counter()


def pass_table(log: PassLog) -> Table:
    """Returns every pass as a row, also one that had nothing to do."""
    rows = [
        [
            Figure("pass", name),
            Figure("runs", log.totals[name].runs),
            Figure("operations", log.totals[name].operations or None),
            Figure("seconds", log.totals[name].seconds if log.totals[name].runs else None, "s"),
            Figure("what it does", does),
        ]
        for name, does in PASSES.items()
    ]
    seconds = sum(totals.seconds for totals in log.totals.values())
    note = (
        f"Operations after all runs of a pass; {seconds:.2f} seconds in passes. From `extract` on"
        " those of F, B, W and BW of every stage are counted. A pass without runs had nothing"
        " to do."
    )
    return Table("passes", rows=rows, notes=[note])
