"""Eager's path: a model that asks torch whether it is being traced gets the same answer as in eager mode.

Many models take another path during an export. transformers' decoders then build the causal mask and repeat keys and
values themselves instead of leaving both to the attention kernel: other kernels, other bits, more memory.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator

import torch

from zbcompile.passes.graph.source_location import calling_line
from zbcompile.passes.torch_private import replaced


@contextlib.contextmanager
def told_it_is_eager(asked: list[str]) -> Iterator[None]:
    """Inside, `torch.compiler.is_compiling()` and `is_exporting()` return False to all code but torch's own.

    The first line of the model that asks, if any does, is added to `asked`.
    """
    with contextlib.ExitStack() as stack:
        for question in ("is_compiling", "is_exporting"):
            answer = _answer(getattr(torch.compiler, question), asked)
            stack.enter_context(replaced(torch.compiler, question, answer))
        yield


def _answer(truth: Callable[[], bool], asked: list[str]) -> Callable[[], bool]:
    def answer() -> bool:
        if _asker().partition(".")[0] == "torch":
            return truth()
        if not asked:
            asked.append(calling_line())
        return False

    return answer


def _asker() -> str:
    """The module of the code that asks, two frames up."""
    frame = inspect.currentframe()
    try:
        return str(frame.f_back.f_back.f_globals.get("__name__"))  # type: ignore[union-attr]
    finally:
        del frame  # a frame that holds itself would keep the fake tensors of all frames above it
