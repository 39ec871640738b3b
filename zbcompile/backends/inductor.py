"""backend="inductor": graphs compiled by torch's inductor. Its cache on disk, in the folder of the
environment variable TORCHINDUCTOR_CACHE_DIR, is shared by ranks and runs."""

from collections.abc import Sequence
from typing import Any

import torch

from zbcompile.backends.types import Run
from zbcompile.errors import PipelineError
from zbcompile.passes.errors import CompileError
from zbcompile.passes.stage.anonymous_graph import BareGraph
from zbcompile.torch_private import has_cpp_compiler, inductor_compile


def compile_by_inductor(graph: BareGraph) -> tuple[Run, bool]:
    """Returns the code of a graph, and whether inductor's cache had it."""
    try:
        run, cached = inductor_compile(graph.module, graph.inputs)
    except Exception as error:
        reason = str(error).partition("\n")[0]  # a C++ compiler's error has pages
        raise CompileError(
            f"inductor cannot compile {graph.title} ({type(error).__name__}: {reason}). Use"
            ' backend="fx".'
        ) from error
    return _checked(run, graph), cached


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


def require_inductor(device: torch.device) -> None:
    """Raises PipelineError if inductor has no C++ compiler for the CPU."""
    if device.type == "cpu" and not has_cpp_compiler():
        raise PipelineError(
            'backend="inductor" needs a C++ compiler on the CPU, and torch found none that works'
            " (it tries the environment variable CXX, g++ and clang++). Install one, or use"
            ' backend="fx".'
        )
