"""`--graph`, `--graphs`, `--diff` and `--passes`: the graphs of a program, and the passes that made them."""

from dataclasses import asdict
from pathlib import Path

from zbcompile.compiler.compile_example import CompiledExample
from zbcompile.compiler.pass_history import OPERATIONS, PassHistory
from zbcompile.errors import PipelineError
from zbcompile.inspection.graph_html import operations_of, to_page
from zbcompile.inspection.request import Subject
from zbcompile.passes.pass_list.passes_in_order import OVERLAP, PASS_NAMES
from zbcompile.passes.pass_list.run_passes import PassManager
from zbcompile.passes.stage.print_python import print_piece
from zbcompile.program.program import Program
from zbcompile.schedules import Schedule
from zbcompile.schedules.ir.actions import Pair
from zbcompile.tables import Figure, Table, grid, wrap

PASSES = ("F", "B", "W", "BW")


def stage_and_pass(text: str) -> tuple[int, str]:
    """The stage and pass that --graph names."""
    stage, _, name = text.partition(".")
    if not stage.isdecimal() or name.upper() not in PASSES:
        raise PipelineError(
            f"--graph {text}: expected STAGE.PASS such as 1.B, with one of the passes {', '.join(PASSES)}."
        )
    return int(stage), name.upper()


def stage_and_passes(first: str, second: str) -> tuple[int, str, str]:
    """The stage and the two passes that --diff names; the first stage if it names none."""
    stage, _, before = first.rpartition(".")
    unknown = [name for name in (before, second) if name not in PASS_NAMES]
    if unknown or not (stage or "0").isdecimal():
        raise PipelineError(f"--diff {first} {second}: expected two passes that --passes lists, such as 1.cut split.")
    return int(stage or 0), before, second


def require_stage(schedule: Schedule, stage: int) -> None:
    """Raise PipelineError if the stage does not exist."""
    if not 0 <= stage < schedule.stages:
        raise PipelineError(
            f"stage {stage} does not exist: {schedule.name} on {schedule.ranks} ranks has stages 0 to "
            f"{schedule.stages - 1}."
        )


def difference(inspected: CompiledExample, history: PassHistory, stage: int, first: str, second: str) -> Table:
    """The changes from one pass to another. A stage that was not compiled itself has another one's graphs."""
    text = history.difference(stage, inspected.program.stages[stage].original, first, second)
    return Table("diff", rows=[[Figure("line", line)] for line in text.splitlines()], picture=text.rstrip("\n"))


def merge_pairs(program: Program, manager: PassManager) -> None:
    """The last pass, which runs when a rank is prepared: it merges each kind of pair in the schedule into one graph."""
    pairs = [step for steps in program.lowered.programs for step in steps if isinstance(step, Pair)]
    for op, stage, other_op, other in dict.fromkeys((*first[:2], *second[:2]) for first, second in pairs):
        manager.run(OVERLAP, (program.stages[stage].pieces[op], program.stages[other].pieces[other_op]), stage=stage)


def graph_text(inspected: CompiledExample, stage: int, name: str) -> str:
    """One graph as a Python module."""
    if name not in inspected.program.stages[stage].pieces:
        raise PipelineError(f"--graph {stage}.{name}: the program is a forward alone, which has no {name}. Ask for F.")
    made, model = inspected.program.stages[stage], type(inspected.example.model).__name__
    title = f"{name} of stage {stage} of {model}: {made.flops[name]:,} FLOPs for one microbatch."
    return print_piece(made.pieces[name], title)


def graph_table(inspected: CompiledExample, stage: int, name: str) -> Table:
    """One graph: as Python for a terminal, as a table of its operations for files."""
    text = graph_text(inspected, stage, name)
    operations = operations_of(inspected.program.stages[stage].pieces[name].module.graph)
    rows = [[Figure(key, value) for key, value in asdict(operation).items()] for operation in operations]
    return Table(f"graph {stage}.{name}", rows=rows, picture=text.rstrip("\n"))


def write_graphs(inspected: CompiledExample, directory: Path) -> list[Path]:
    """Write every graph as a Python file, and all on one page; return a line that says so."""
    page = directory / "graphs.html"
    page.write_text(to_page(inspected.program, type(inspected.example.model).__name__), encoding="utf-8")
    paths = [page]
    for stage, made in enumerate(inspected.program.stages):
        for name in filter(made.pieces.__contains__, PASSES):
            paths.append(directory / f"stage{stage}_{name}.py")
            paths[-1].write_text(graph_text(inspected, stage, name), encoding="utf-8")
    return paths


def pass_table(subject: Subject) -> Table:
    """Every pass as a row, even if it changed nothing; operations and seconds are sums over its runs."""
    assert subject.history is not None
    costs = subject.history.costs()
    rows = [
        [
            Figure("pass", cost.name),
            Figure("runs", cost.runs),
            Figure("before", cost.before.get(OPERATIONS)),
            Figure("after", cost.after.get(OPERATIONS)),
            Figure("seconds", cost.seconds if cost.runs else None),
            Figure("what it does", cost.does),
            Figure("effect", cost.effect),
        ]
        for cost in costs
    ]
    note = (
        f"Operations of all runs of a pass; {sum(cost.seconds for cost in costs):.2f} seconds in passes. Stages "
        "that do the same work as another go only through `deduplicate`. A pass without runs had nothing to do."
    )
    room = max(len(cost.name) for cost in costs) + 2
    effects = (wrap(f"{cost.name:<{room}}{cost.effect}", " " * room) for cost in costs if cost.runs)
    picture = grid([row[:-1] for row in rows]) + "\n\n" + "\n".join(line for lines in effects for line in lines)
    return Table("passes", rows=rows, notes=[note], picture=picture)
