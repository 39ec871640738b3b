"""Deep calls without system calls.

CPython (3.11 to 3.13, at least) keeps the frames of a thread in chunks of 16 KiB and gives a chunk back as soon as its
first frame returns. A loop that calls across the end of a chunk maps and unmaps memory at every turn; tracing a model
does so ten thousand times a second. A frame that is larger than a chunk gets one of its own size, rounded up to a
power of two, and what it calls finds room in the rest.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
WORDS = 140_000  # 1.1 MB of 2 MiB, no page of which is touched: the rest takes some 1,000 frames


def in_one_chunk(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args, **kwargs)`, with room for its frames and those of all that it calls. An exception that is kept
    keeps this frame: 1.1 MB of address space, 4 KB of memory."""
    return function(*args, **kwargs)


in_one_chunk.__code__ = in_one_chunk.__code__.replace(co_stacksize=WORDS)
