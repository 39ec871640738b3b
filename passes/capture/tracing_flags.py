"""Eager's path: a model that asks torch whether it is being traced gets the same answer as in eager mode.

Many models take another path during an export. transformers' decoders then build the causal mask and repeat keys and
values themselves instead of leaving both to the attention kernel: other kernels, other bits, more memory.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from zbcompile.passes.graph.source_location import calling_line
from zbcompile.passes.torch_private import FakeTensor, NoTensor, asked_for_fake_tensors, replaced
from zbcompile.passes.values.open_numbers import asker

FAKES, FLAGS = "fakes", "flags"
EAGER = (FAKES, FLAGS)


class Way(NamedTuple):
    """How a model is traced: `hides` says what it is told as in eager mode, the rest is the truth; `numbers` whether it
    gets the numbers that it reads from its inputs. They are left open if it can be captured so, since a number that is
    only logged decides nothing."""

    hides: tuple[str, ...]
    numbers: bool

    @contextlib.contextmanager
    def told(self, asked: dict[str, str]) -> Iterator[None]:
        """Inside, with FLAGS, `torch.compiler.is_compiling()` and `is_exporting()` return False to all code but torch's
        own; with FAKES no tensor is an instance of `torch._subclasses.FakeTensor`.

        The first line of the model that asks either, if any does, is added to `asked`.
        """
        with contextlib.ExitStack() as stack:
            if FAKES in self.hides:
                answer = _answer(lambda: FakeTensor, NoTensor, FAKES, asked)
                stack.enter_context(asked_for_fake_tensors(answer))
            for question in ("is_compiling", "is_exporting") if FLAGS in self.hides else ():
                answer = _answer(getattr(torch.compiler, question), False, FLAGS, asked)
                stack.enter_context(replaced(torch.compiler, question, answer))
            yield


EAGERS_WAY = Way(EAGER, numbers=False)


def ways_to_trace(reads_numbers: Callable[[], bool], asked: Mapping[str, str]) -> Iterator[Way]:
    """What to try next after each failure, beginning with what eager mode does."""
    for hides, more in ((EAGER, None), ((FLAGS,), FAKES), ((), FLAGS)):
        if more is None or more in asked:
            yield Way(hides, numbers=False)
            if reads_numbers():
                yield Way(hides, numbers=True)


def _answer(truth: Callable[[], Any], eagers: Any, kind: str, asked: dict[str, str]) -> Callable[..., Any]:
    def answer(*_: Any) -> Any:
        if asker().partition(".")[0] == "torch":
            return truth()
        if kind not in asked:
            asked[kind] = calling_line()
        return eagers

    return answer
