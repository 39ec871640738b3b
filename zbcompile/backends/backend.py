"""Backends, which run the graphs of a program (as FX code, by inductor, or by a user's function),
and the choice of the passes that this process compiles.

A backend takes pieces and gives calls: functions of one list, which they empty, so that each input
can be freed at its last use. Graphs that do the same work are compiled once (see
`zbcompile.passes.stage.anonymous_graph`), however many stages have them. The names that `backend=`
takes are in `zbcompile.options.BACKENDS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from zbcompile.backends.cuda_graphs import record
from zbcompile.backends.inductor import compile_by_inductor, require_inductor
from zbcompile.backends.types import GraphCompiler, Run
from zbcompile.errors import PipelineError
from zbcompile.options import backend_name
from zbcompile.passes import gpu
from zbcompile.passes.errors import CompileError
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.stage.anonymous_graph import BareGraph, bare
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.torch_private import boxed
from zbcompile.program.program import Program
from zbcompile.schedules.ir.actions import flatten
from zbcompile.torch_private import takes_a_list

Key = TypeVar("Key")


@dataclass(frozen=True)
class Compilation:
    """The work of a backend for one program on this process: of `graphs` passes, `distinct` ones
    differ in more than names; `compiled` were compiled here, `loaded` come from the cache (or from
    another rank, by way of it).
    """

    backend: str
    graphs: int
    distinct: int
    compiled: int = 0
    loaded: int = 0

    def __str__(self) -> str:
        text = f"{self.backend}: {self.graphs} graphs, {self.distinct} of them distinct"
        parts = [
            f"{n} {what}"
            for n, what in ((self.compiled, "compiled here"), (self.loaded, "from the cache"))
            if n
        ]
        return f"{text}: {', '.join(parts)}" if parts else text


# A graph's code, and whether a cache had it.
Compiler = Callable[[BareGraph], tuple[Run, bool]]


@dataclass
class Backend:
    """Compiles and runs the pieces of one pipeline. Without a `compiler` the graphs run as FX code;
    with one, `made` holds what it compiled, by text, for all shapes of the pipeline."""

    name: str
    compiler: Compiler | None = None
    made: dict[str, Run] = field(default_factory=dict)

    def compile(
        self, pieces: Mapping[Key, PassGraph], first: int = 0
    ) -> tuple[dict[Key, Run], Compilation]:
        """Returns the code of each piece, and a report. `first` is the number of the rank: ranks
        begin at different graphs, so that a shared cache has most of a rank's when it gets there.
        """
        if self.compiler is None:
            report = Compilation(self.name, len(pieces), 0)
            return {place: _fx(piece) for place, piece in pieces.items()}, report
        graphs = {place: bare(piece.module) for place, piece in pieces.items() if not piece.empty}
        distinct = {graph.text: graph for graph in graphs.values()}
        missing = [text for text in distinct if text not in self.made]
        begin, loaded = first % max(len(missing), 1), 0
        for text in (*missing[begin:], *missing[:begin]):
            self.made[text], is_loaded = self.compiler(distinct[text])
            loaded += is_loaded
        runs = {
            place: self.made[graphs[place].text] if place in graphs else _fx(piece)
            for place, piece in pieces.items()
        }
        counts = len(graphs), len(distinct), len(missing) - loaded, loaded
        return runs, Compilation(self.name, *counts)


def _fx(piece: PassGraph) -> Run:
    return boxed(piece.module).forward  # type: ignore[no-any-return]


def _compile_by(function: GraphCompiler, name: str, graph: BareGraph) -> tuple[Run, bool]:
    """Compiles by a user's `function(graph_module, example_inputs)`, which returns what is called
    in place of the graph."""
    try:
        compiled = function(graph.module, graph.inputs)
    except Exception as error:
        raise CompileError(
            f"backend {name} failed on {graph.title}: {type(error).__name__}: {error}"
        ) from error
    if not callable(compiled):
        raise CompileError(
            f"backend {name} returned a {type(compiled).__name__} for {graph.title};"
            " expected a function to call in place of the graph."
        )
    run = compiled if takes_a_list(compiled) else _unpacking(compiled)
    return _counted(run, len(output_values(graph.module.graph)), name), False


def _unpacking(function: Callable[..., Any]) -> Run:
    def run(values: list[Any]) -> Any:
        arguments = tuple(values)
        values.clear()
        return function(*arguments)

    return run


def _counted(run: Callable[[list[Any]], Any], results: int, name: str) -> Run:
    """Returns `run` with a check that it returns a list or tuple of `results` values."""

    def call(values: list[Any]) -> Sequence[torch.Tensor]:
        outputs = run(values)
        if not isinstance(outputs, list | tuple) or len(outputs) != results:
            what = (
                f"{len(outputs)} values"
                if isinstance(outputs, list | tuple)
                else f"a {type(outputs).__name__}"
            )
            raise PipelineError(
                f"backend {name} compiled a function that returned {what}; the graph returns"
                f" {results}."
            )
        return outputs

    return call


def make_backend(backend: str | GraphCompiler, device: torch.device) -> Backend:
    """Returns the backend of a pipeline on `device`. Raises PipelineError if inductor finds no
    compiler."""
    if backend == "fx":
        return Backend("fx")
    if backend == "inductor":
        require_inductor(device)
        return Backend("inductor", compile_by_inductor)
    assert callable(backend)
    name = backend_name(backend)
    return Backend(name, partial(_compile_by, backend, name))


Owner = tuple[str, int]  # "stage" and its number, or "shard" of an output layer and its rank
# The code of each pass by its owner and name (without any the graphs run as FX code), and a report.
CompiledPasses = tuple[Mapping[Owner, Mapping[str, Run]], Compilation]


def compile_passes(
    program: Program, ranks: Sequence[int], backend: Backend, cuda_graphs: bool = False
) -> CompiledPasses:
    """Compiles what `ranks` run; with `cuda_graphs` each pass records itself.

    A pass that is not in their order, which torch's own schedules may call, stays FX code.
    """
    owners: dict[Owner, Mapping[str, PassGraph]] = {
        ("stage", stage): program.stages[stage].pieces
        for rank in ranks
        for stage in program.stages_of(rank)
    }
    if program.vocabulary is not None:
        owners |= {("shard", rank): program.vocabulary.pieces[rank] for rank in ranks}
    passes = {
        (*owner, name): piece for owner, pieces in owners.items() for name, piece in pieces.items()
    }
    if backend.compiler is None and not cuda_graphs:
        return {}, Compilation(backend.name, len(passes), 0)
    ordered = {
        ("stage", action.stage, action.op)
        for rank in ranks
        for action in flatten(program.lowered.orders[rank])
    }
    now = {p: piece for p, piece in passes.items() if p[0] == "shard" or p in ordered}
    runs, compilation = backend.compile(now, min(ranks))
    if cuda_graphs:
        pool = gpu.graph_pool()
        runs = {
            place: record("{2} of {0} {1}".format(*place), run, passes[place], pool)
            for place, run in runs.items()
        }
    by_owner = {
        o: {name: runs[*o, name] for name in pieces if (*o, name) in runs}
        for o, pieces in owners.items()
    }
    return by_owner, compilation
