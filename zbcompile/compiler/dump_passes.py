"""`ZBCOMPILE_DUMP=DIR`: the graphs after every pass of the compiler, as files to read and to
compare."""

import os
from collections.abc import Iterator
from typing import Any

from torch.fx import Graph

from zbcompile.env import DUMP
from zbcompile.passes.compile_step import Observer
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.step_graph import StepGraph


def with_dumps(observe: Observer) -> Observer:
    """Returns an observer that writes what each pass made into `DIR/rankN/NUMBER-PASS.txt` if
    ZBCOMPILE_DUMP is set, and calls `observe`.

    Numbers count up in the order in which passes end, also over several compilations.
    """
    folder = DUMP.read()
    if folder is None:
        return observe
    rank_folder = folder / f"rank{os.environ.get('RANK', '0')}"

    def write(name: str, artifact: Any) -> None:
        rank_folder.mkdir(parents=True, exist_ok=True)
        number = sum(1 for _ in rank_folder.iterdir())
        (rank_folder / f"{number:04}-{name}.txt").write_text(text_of(artifact), encoding="utf-8")
        observe(name, artifact)

    return write


def graphs_of(artifact: Any) -> list[Graph]:
    """Returns the graphs of a step, of the labels of a step, or of a list of pass graphs."""
    if isinstance(artifact, StepGraph):
        return [artifact.graph]
    if isinstance(artifact, dict):
        return [next(iter(artifact)).graph]
    return [pass_graph.module.graph for pass_graph in artifact]


def text_of(artifact: Any) -> str:
    """Returns an operation per line, each with its label (`1.B`) once there are labels."""
    return "\n".join(_lines(artifact)) + "\n"


def _lines(artifact: Any) -> Iterator[str]:
    if not isinstance(artifact, list):
        labels = artifact if isinstance(artifact, dict) else {}
        for node in graphs_of(artifact)[0].nodes:
            yield f"{labels.get(node, '')!s:5} {node.format_node()}"
        return
    for pass_graph in artifact:
        assert isinstance(pass_graph, PassGraph)
        yield f"# {pass_graph.name}"
        yield f"# in: {', '.join(map(str, pass_graph.inputs))}"
        yield f"# out: {', '.join(map(str, pass_graph.outputs))}"
        yield pass_graph.module.print_readable(print_output=False, include_stride=True)
