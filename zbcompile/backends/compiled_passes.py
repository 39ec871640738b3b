"""Which passes of a program this process runs, compiled by the pipeline's backend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zbcompile.backends.backend import Backend, Compilation
from zbcompile.backends.cuda_graphs import record
from zbcompile.backends.types import Run
from zbcompile.passes.split.subgraphs import Piece
from zbcompile.passes.stage.draws import is_apart
from zbcompile.program.program import Program
from zbcompile.schedules.ir.actions import flatten


class Place(NamedTuple):
    """A pass of a stage, or of a rank's vocabulary shard."""

    name: str
    kind: str
    owner: int

    def __str__(self) -> str:
        return f"{self.name} of {self.kind} {self.owner}"


@dataclass(frozen=True)
class CompiledPasses:
    """What a backend made of the passes that this process runs, and a report of it; `runs` is empty for the
    fx backend."""

    runs: Mapping[Place, Run]
    compilation: Compilation

    def of(self, kind: str, owner: int) -> dict[str, Run] | None:
        """The calls of a "stage", or of a rank's "shard", by pass; None if its graphs run as FX code."""
        return {place.name: run for place, run in self.runs.items() if place[1:] == (kind, owner)} or None


def compile_passes(
    program: Program, ranks: Sequence[int], backend: Backend, cuda_graphs: bool = False
) -> CompiledPasses:
    """Compile what `ranks` run, and with `cuda_graphs` let each pass record itself. A pass that is not in their order
    (torch's own schedules may call it) is compiled when it is first called."""
    passes = _passes_of(program, ranks)
    if backend.compiler is None and not cuda_graphs:
        return CompiledPasses({}, Compilation(backend.name, len(passes), 0))
    ordered = {(action.op, action.stage) for rank in ranks for action in flatten(program.lowered.programs[rank])}
    now = {p: piece for p, piece in passes.items() if p.kind == "shard" or (p.name, p.owner) in ordered}
    runs, compilation = backend.compile(now, min(ranks))
    calls = runs | {place: backend.later(piece) for place, piece in passes.items() if place not in now}
    if cuda_graphs:
        pool = torch.cuda.graph_pool_handle()
        recorded = {place: run for place, run in calls.items() if not is_apart(passes[place])}
        calls |= {place: record(str(place), run, passes[place], pool) for place, run in recorded.items()}
    return CompiledPasses(calls, compilation)


def _passes_of(program: Program, ranks: Sequence[int]) -> dict[Place, Piece]:
    owners = [("stage", stage, program.stages[stage].pieces) for rank in ranks for stage in program.stages_of(rank)]
    owners += [("shard", rank, program.vocabulary.pieces[rank]) for rank in ranks] if program.vocabulary else []
    return {Place(name, kind, owner): piece for kind, owner, pieces in owners for name, piece in pieces.items()}
