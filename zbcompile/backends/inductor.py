"""backend="inductor": graphs compiled by torch's inductor, through a cache on disk that ranks and
runs share."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zbcompile.backends.compile_cache import CompileCache, How, cache_folder
from zbcompile.backends.types import Run
from zbcompile.errors import PipelineError
from zbcompile.passes import gpu
from zbcompile.passes.errors import CompileError
from zbcompile.passes.stage.anonymous_graph import BareGraph
from zbcompile.torch_private import (
    cpp_compiler,
    inductor_compile,
    inductor_files_in,
    inductor_load,
    inductor_settings,
    vector_instructions,
)

CODE, INSTRUCTIONS = "graph.pickle", "instructions.txt"


@dataclass(frozen=True)
class Inductor:
    """Compiles graphs for one machine, which `machine` describes."""

    cache: CompileCache
    machine: str

    def key(self, graph: BareGraph) -> str:
        """A hash of all that decides the code: the graph, torch and its options, the machine."""
        return _digest(inductor_settings(), self.machine, graph.text)[:40]

    def compile(self, graphs: Mapping[str, BareGraph], first: int) -> Mapping[str, tuple[Run, How]]:
        makers = {key: functools.partial(_make, graph) for key, graph in graphs.items()}
        return self.cache.obtain(makers, _load, first % max(len(makers), 1))


def _make(graph: BareGraph, folder: Path) -> None:
    with inductor_files_in(folder):
        try:
            content = inductor_compile(graph.module, graph.inputs)
        except Exception as error:
            raise CompileError(
                f"inductor cannot compile {graph.title} ({type(error).__name__}: {error}). Use"
                ' backend="fx".'
            ) from error
    (folder / CODE).write_bytes(content)


def _load(key: str, folder: Path) -> Run:
    """Load an entry, which this user made with this release of torch: the key guarantees it."""
    with inductor_files_in(folder):
        return inductor_load((folder / CODE).read_bytes())


def make_inductor(device: torch.device) -> Inductor:
    """Inductor with the tools of this machine. Raises PipelineError if there is no C++ compiler."""
    cache = CompileCache(cache_folder())
    if device.type == "cpu":
        return Inductor(cache, _processor(cache))
    return Inductor(cache, gpu.architecture(device))


def _processor(cache: CompileCache) -> str:
    """The C++ compiler and the vector instructions that it compiles for, tried once per machine."""
    try:
        compiler, version = cpp_compiler()
    except RuntimeError as error:
        raise PipelineError(
            'backend="inductor" needs a C++ compiler on the CPU, and torch found none that works'
            " (it tries the environment variable CXX, g++ and clang++). Install one, or use"
            ' backend="fx".'
        ) from error
    trial = f"machine-{_digest(torch.__version__, compiler, version)[:16]}"
    ((instructions, _),) = cache.obtain({trial: _try_instructions}, _read_instructions).values()
    return "\n".join((compiler, version, instructions))


def _try_instructions(folder: Path) -> None:
    with inductor_files_in(folder):
        (folder / INSTRUCTIONS).write_text(vector_instructions(None))


def _read_instructions(key: str, folder: Path) -> str:
    with inductor_files_in(
        folder
    ):  # also compiles what torch tries whatever it is told (AMX, bfloat16)
        return vector_instructions((folder / INSTRUCTIONS).read_text())


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
