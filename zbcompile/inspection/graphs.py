"""`--graph`, `--graphs` and `--diff`: the graphs of a program, as text, data and pages."""

import json
from pathlib import Path

from zbcompile.compiler.compile_example import Inspected
from zbcompile.compiler.pass_history import PassHistory
from zbcompile.errors import PipelineError
from zbcompile.inspection.graph_data import PASSES, graph_of
from zbcompile.inspection.graph_dot import to_dot
from zbcompile.inspection.graph_html import to_page
from zbcompile.inspection.request import Request, require_stage
from zbcompile.passes.pass_list.passes_in_order import OVERLAP
from zbcompile.passes.pass_list.run_passes import PassManager
from zbcompile.passes.stage.print_python import print_piece
from zbcompile.program.program import Program
from zbcompile.runtime.overlapped_pairs import kinds_of_pairs


def stage_and_pass(text: str) -> tuple[int, str]:
    """The stage and pass that --graph names."""
    stage, _, name = text.partition(".")
    if not stage.isdecimal() or name.upper() not in PASSES:
        raise PipelineError(
            f"--graph {text}: expected STAGE.PASS such as 1.B, with one of the passes {', '.join(PASSES)}."
        )
    return int(stage), name.upper()


def difference(inspected: Inspected, history: PassHistory, request: Request) -> str:
    """The changes from one pass to another. A stage that was not compiled itself has another one's graphs."""
    assert request.diff is not None
    stage = request.stage or 0
    require_stage(inspected.program.schedule, stage)
    return history.difference(stage, inspected.program.stages[stage].original, *request.diff)


def merge_pairs(program: Program, manager: PassManager) -> None:
    """The last pass, which a rank runs when it is prepared: each kind of pair in the schedule as one graph."""
    for f, op, b in dict.fromkeys(kind for steps in program.lowered.programs for kind in kinds_of_pairs(steps)):
        manager.run(OVERLAP, (program.stages[f].pieces["F"], program.stages[b].pieces[op]), stage=f)


def graph_text(inspected: Inspected, stage: int, name: str, form: str) -> str:
    """One graph in the form that was asked for."""
    require_stage(inspected.program.schedule, stage)
    if form == "text":
        made, model = inspected.program.stages[stage], type(inspected.example.model).__name__
        title = f"{name} of stage {stage} of {model}: {made.flops[name]:,} FLOPs for one microbatch."
        return print_piece(made.pieces[name], title)
    graph = graph_of(inspected.program, stage, name)
    return to_dot(graph) if form == "dot" else json.dumps(graph.to_dict(), indent=1) + "\n"


def write_graphs(inspected: Inspected, directory: Path, form: str) -> None:
    """Every graph as a file, or all on one page; prints what was written."""
    if form == "html":
        page = directory / "graphs.html"
        page.write_text(to_page(inspected.program, type(inspected.example.model).__name__), encoding="utf-8")
        print(page)
        return
    for stage in range(len(inspected.program.stages)):
        for name in PASSES:
            path = directory / f"stage{stage}_{name}.{'py' if form == 'text' else form}"
            path.write_text(graph_text(inspected, stage, name, form), encoding="utf-8")
            print(path)
