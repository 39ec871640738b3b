"""`--graph`, `--graphs`, `--diff` and `--passes`: the graphs of a program, and what made them, as text and pages."""

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from tabulate import tabulate

from zbcompile.compiler.compile_example import Inspected
from zbcompile.compiler.pass_history import PassCost, PassHistory
from zbcompile.errors import PipelineError
from zbcompile.inspection.graph_data import PASSES, Boundary, Graph, Operation, graph_of
from zbcompile.inspection.graph_html import to_page
from zbcompile.inspection.request import Request, require_stage
from zbcompile.inspection.summary import SCHEMA
from zbcompile.passes.pass_list.passes_in_order import OVERLAP
from zbcompile.passes.pass_list.run_passes import PassManager
from zbcompile.passes.stage.print_python import print_piece
from zbcompile.program.program import Program
from zbcompile.schedules.ir.actions import Pair


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
    pairs = [step for steps in program.lowered.programs for step in steps if isinstance(step, Pair)]
    for op, stage, other_op, other in dict.fromkeys((*first[:2], *second[:2]) for first, second in pairs):
        manager.run(OVERLAP, (program.stages[stage].pieces[op], program.stages[other].pieces[other_op]), stage=stage)


def graph_text(inspected: Inspected, stage: int, name: str, form: str) -> str:
    """One graph in the form that was asked for."""
    require_stage(inspected.program.schedule, stage)
    if name not in inspected.program.stages[stage].pieces:
        raise PipelineError(f"--graph {stage}.{name}: the program is a forward alone, which has no {name}. Ask for F.")
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
    for stage, made in enumerate(inspected.program.stages):
        for name in filter(made.pieces.__contains__, PASSES):
            path = directory / f"stage{stage}_{name}.{'py' if form == 'text' else form}"
            path.write_text(graph_text(inspected, stage, name, form), encoding="utf-8")
            print(path)


HEADERS = ("pass", "runs", "before", "after", "seconds", "what it does")


def pass_table(history: PassHistory, as_json: bool) -> str:
    """Every pass as a row, also one that had nothing to do; operations and seconds are sums over its runs."""
    costs = history.costs()
    if as_json:
        return json.dumps({"schema": SCHEMA, "passes": [asdict(cost) for cost in costs]}, indent=1) + "\n"
    rows = [_row(cost) for cost in costs]
    seconds = sum(cost.seconds for cost in costs)
    return (
        tabulate(rows, HEADERS, disable_numparse=True, colalign=("left", *("right",) * 4, "left"))
        + f"\n\nOperations of all runs of a pass; {seconds:.2f} seconds in passes. Stages that do the same work as "
        "another\ngo only through `deduplicate`. A pass without runs had nothing to do.\n"
    )


def _row(cost: PassCost) -> tuple[str, ...]:
    if not cost.runs:
        return cost.name, "-", "", "", "", cost.does
    before = "" if cost.before is None else f"{cost.before:,}"
    return cost.name, str(cost.runs), before, f"{cost.after:,}", f"{cost.seconds:.3f}", cost.does


FILL = {"F": "#cfe8f7", "B": "#f6dca6", "W": "#bfe5d6", "BW": "#f3c7ab"}


def to_dot(graph: Graph) -> str:
    """The text for `dot -Tsvg`."""
    boxes = enumerate(groupby(graph.operations, key=lambda op: op.module))  # neighbours of the same module
    lines = [
        f'digraph "stage {graph.stage} {graph.name}" {{',
        '  node [shape=box, style=filled, fontname="sans-serif", fontsize=10];',
        *(_oval(b.node, b) for b in graph.inputs),
        *(line for i, (module, ops) in boxes for line in _cluster(i, module, list(ops), FILL[graph.name])),
        *(_oval(f"output {i}", b) for i, b in enumerate(graph.outputs)),
        *(f"  {_quoted(a)} -> {_quoted(op.name)};" for op in graph.operations for a in op.inputs),
        *(f"  {_quoted(b.node)} -> {_quoted(f'output {i}')};" for i, b in enumerate(graph.outputs)),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _cluster(index: int, module: str, operations: list[Operation], fill: str) -> list[str]:
    texts = [(op, _quoted(f"{op.operator}\n{op.value}".strip())) for op in operations]
    boxes = [f"    {_quoted(op.name)} [label={text}, tooltip={_quoted(op.line)}];" for op, text in texts]
    head = f"  subgraph cluster_{index} {{ label={_quoted(module or operations[0].made_by)};"
    return [f'{head} color="#999999"; node [fillcolor="{fill}"];', *boxes, "  }"]


def _oval(name: str, boundary: Boundary) -> str:
    label = _quoted(f"{boundary.meaning}\n{boundary.value}".strip())
    return f'  {_quoted(name)} [label={label}, shape=oval, fillcolor="#eeeeee"];'


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
