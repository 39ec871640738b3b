"""backend="inductor": graphs compiled by torch's inductor. Its cache on disk, in the folder of the
environment variable TORCHINDUCTOR_CACHE_DIR, is shared by ranks and runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zbcompile.backends.types import How, Run
from zbcompile.errors import PipelineError
from zbcompile.passes.errors import CompileError
from zbcompile.passes.stage.anonymous_graph import BareGraph
from zbcompile.torch_private import has_cpp_compiler, inductor_compile


class Inductor:
    """Compiles graphs through inductor's cache."""

    def compile(self, graphs: Mapping[str, BareGraph], first: int) -> Mapping[str, tuple[Run, How]]:
        """Compiles the graphs in turn. Ranks begin at different ones, so most graphs of a rank are
        in the cache when it reaches them."""
        keys = list(graphs)
        begin = first % max(len(keys), 1)
        return {key: _compile(graphs[key]) for key in (*keys[begin:], *keys[:begin])}


def _compile(graph: BareGraph) -> tuple[Run, How]:
    try:
        run, cached = inductor_compile(graph.module, graph.inputs)
    except Exception as error:
        reason = str(error).partition("\n")[0]  # a C++ compiler's error has pages
        raise CompileError(
            f"inductor cannot compile {graph.title} ({type(error).__name__}: {reason}). Use"
            ' backend="fx".'
        ) from error
    return _checked(run, graph), "loaded" if cached else "compiled"


def _checked(run: Run, graph: BareGraph) -> Run:
    """Returns `run` with a check of dtypes: compiled code checks shapes and strides itself, and
    would read the bytes of one dtype as another."""
    dtypes = [value.dtype for value in graph.inputs]

    def call(values: list[Any]) -> Sequence[torch.Tensor]:
        for number, (value, dtype) in enumerate(zip(values, dtypes, strict=True)):
            if value.dtype is not dtype:
                raise PipelineError(
                    f"input {number} of {graph.title} is {value.dtype}, and was compiled as"
                    f' {dtype}. Use backend="fx".'
                )
        return run(values)

    return call


def make_inductor(device: torch.device) -> Inductor:
    """Raises PipelineError if inductor has no C++ compiler for the CPU."""
    if device.type == "cpu" and not has_cpp_compiler():
        raise PipelineError(
            'backend="inductor" needs a C++ compiler on the CPU, and torch found none that works'
            " (it tries the environment variable CXX, g++ and clang++). Install one, or use"
            ' backend="fx".'
        )
    return Inductor()
