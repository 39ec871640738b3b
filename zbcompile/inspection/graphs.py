"""`--graph`, `--graphs` and `--passes`: the graphs of a program, and the passes that made them."""

from dataclasses import dataclass, field
from pathlib import Path

from torch.fx import Node

from zbcompile.compiler.compile_example import CompiledExample
from zbcompile.errors import PipelineError
from zbcompile.passes.graph.source_location import origin_of
from zbcompile.passes.pass_list.passes_in_order import OVERLAP, PASSES
from zbcompile.passes.pass_list.run_passes import PassManager, PassRun
from zbcompile.passes.verification.graph_views import count_operations
from zbcompile.program.program import Program
from zbcompile.schedules import Schedule
from zbcompile.schedules.ir.actions import Pair
from zbcompile.tables import Figure, Table

PASS_LETTERS = ("F", "B", "W", "BW")


def stage_and_pass(text: str) -> tuple[int, str]:
    """The stage and pass that --graph names."""
    stage, _, name = text.partition(".")
    if not stage.isdecimal() or name.upper() not in PASS_LETTERS:
        raise PipelineError(
            f"--graph {text}: expected STAGE.PASS such as 1.B, with one of the passes {', '.join(PASS_LETTERS)}."
        )
    return int(stage), name.upper()


def require_stage(schedule: Schedule, stage: int) -> None:
    """Raise PipelineError if the stage does not exist."""
    if not 0 <= stage < schedule.stages:
        raise PipelineError(
            f"stage {stage} does not exist: {schedule.name} on {schedule.ranks} ranks has stages 0 to "
            f"{schedule.stages - 1}."
        )


def merge_pairs(program: Program, manager: PassManager) -> None:
    """The last pass, which runs when a rank is prepared: it merges each kind of pair in the schedule into one graph."""
    pairs = [step for steps in program.lowered.orders for step in steps if isinstance(step, Pair)]
    for op, stage, other_op, other in dict.fromkeys((*first[:2], *second[:2]) for first, second in pairs):
        manager.run(OVERLAP, (program.stages[stage].pieces[op], program.stages[other].pieces[other_op]), stage=stage)


def graph_text(inspected: CompiledExample, stage: int, name: str) -> str:
    """Returns one graph as torch.fx prints it, below a title and the role of each input and output."""
    if name not in inspected.program.stages[stage].pieces:
        raise PipelineError(f"--graph {stage}.{name}: the program is a forward alone, which has no {name}. Ask for F.")
    program, model = inspected.program.stages[stage], type(inspected.example.model).__name__
    piece = program.pieces[name]
    roles = [f"# in: {', '.join(map(str, piece.inputs))}", f"# out: {', '.join(map(str, piece.outputs))}"]
    title = f"# {name} of stage {stage} of {model}: {program.flops[name]:,} FLOPs for one microbatch"
    return "\n".join([title, *roles, piece.module.print_readable(print_output=False, include_stride=True)])


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
        Figure("made_by", str(node.meta.get("pass", ""))),
    ]


def write_graphs(inspected: CompiledExample, directory: Path) -> list[Path]:
    """Writes every graph into a file of its own; returns their paths."""
    paths = []
    for stage, program in enumerate(inspected.program.stages):
        for name in filter(program.pieces.__contains__, PASS_LETTERS):
            paths.append(directory / f"stage{stage}_{name}.py")
            paths[-1].write_text(graph_text(inspected, stage, name), encoding="utf-8")
    return paths


@dataclass
class PassTotals:
    """How often a pass ran (over the model or each distinct stage), the operations after it, and its seconds."""

    runs: int = 0
    operations: int = 0
    seconds: float = 0.0


@dataclass
class PassLog:
    """The totals of every pass by its name. Pass it to the compiler as `observe`."""

    totals: dict[str, PassTotals] = field(default_factory=lambda: {each.name: PassTotals() for each in PASSES})

    def __call__(self, run: PassRun) -> None:
        totals = self.totals[run.name]
        totals.runs += 1
        totals.operations += count_operations(run.made)
        totals.seconds += run.seconds


def pass_table(log: PassLog) -> Table:
    """Returns every pass as a row, also one that had nothing to do."""
    rows = [
        [
            Figure("pass", each.name),
            Figure("runs", log.totals[each.name].runs),
            Figure("operations", log.totals[each.name].operations or None),
            Figure("seconds", log.totals[each.name].seconds if log.totals[each.name].runs else None),
            Figure("what it does", each.does),
        ]
        for each in PASSES
    ]
    seconds = sum(totals.seconds for totals in log.totals.values())
    note = (
        f"Operations after all runs of a pass; {seconds:.2f} seconds in passes. Stages that do the same work as "
        "another go only through `deduplicate`. A pass without runs had nothing to do."
    )
    return Table("passes", rows=rows, notes=[note])
