"""Eager's path: a model that asks torch whether it is being traced gets the same answer as in eager mode.

Many models take another path during an export. transformers' decoders then build the causal mask and repeat keys and
values themselves instead of leaving both to the attention kernel: other kernels, other bits, more memory.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zbcompile.passes.capture.open_numbers import asker
from zbcompile.passes.graph.source_location import calling_line
from zbcompile.passes.torch_private import FakeTensor, NoTensor, asked_for_fake_tensors, replaced


class TracingWay(NamedTuple):
    """How a model is traced: whether it is told that it runs in eager mode, and whether it gets the `numbers` that it
    reads from its inputs. They are left open if it can be captured so, since a number that is only logged decides
    nothing."""

    eager: bool
    numbers: bool

    @contextlib.contextmanager
    def told(self, asked: list[str]) -> Iterator[None]:
        """Inside, on eager's way, `torch.compiler.is_compiling()` and `is_exporting()` return False to all code but
        torch's own, and no tensor is an instance of `torch._subclasses.FakeTensor`.

        The first line of the model that asks, if any does, is added to `asked`.
        """
        with contextlib.ExitStack() as stack:
            if self.eager:
                stack.enter_context(asked_for_fake_tensors(_answer(lambda: FakeTensor, NoTensor, asked)))
            for question in ("is_compiling", "is_exporting") if self.eager else ():
                answer = _answer(getattr(torch.compiler, question), False, asked)
                stack.enter_context(replaced(torch.compiler, question, answer))
            yield


EAGERS_WAY = TracingWay(eager=True, numbers=False)


def ways_to_trace(reads_numbers: Callable[[], bool], asked: Sequence[str]) -> Iterator[TracingWay]:
    """What to try next after each failure: what eager mode does, with the numbers that forward has read, and the
    truth."""
    yield EAGERS_WAY
    if reads_numbers():
        yield TracingWay(eager=True, numbers=True)
    if asked:
        yield TracingWay(eager=False, numbers=reads_numbers())


def _answer(truth: Callable[[], Any], eagers: Any, asked: list[str]) -> Callable[..., Any]:
    def answer(*_: Any) -> Any:
        if asker().partition(".")[0] == "torch":
            return truth()
        if not asked:
            asked.append(calling_line())
        return eagers

    return answer
