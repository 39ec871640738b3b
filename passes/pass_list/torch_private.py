"""Every private PyTorch name that this room uses, with the reason and the versions that have it."""

import contextlib
import copy
import sys
import traceback
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch._subclasses import fake_tensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor

from zbcompile.passes.torch_private import replaced


@contextlib.contextmanager
def quick_traces() -> Iterator[None]:
    """Inside, torch's traces leave out what nothing reads: the code of their graphs; `tensor_meta`, which repeats
    `val`; copies of a node's origin; stack frames outside the model; the stack of the place that made a fake mode."""
    shared = SimpleNamespace(copy=copy.copy, deepcopy=lambda sources: sources)
    with (
        _use_lazy_graph_module(True),
        replaced(proxy_tensor, "_extract_tensor_metadata", lambda _: None),
        replaced(fake_tensor, "traceback", SimpleNamespace(extract_stack=list, format_list=traceback.format_list)),
        replaced(torch.fx.traceback, "copy", shared),
        replaced(torch.fx.proxy, "CapturedTraceback", SimpleNamespace(extract=lambda: SimpleNamespace(summary=_stack))),
    ):
        yield


def _stack() -> traceback.StackSummary:
    """The stack of a trace, from the first `forward` inwards. Its lines of source are read only when they are
    printed."""
    frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(sys._getframe(1))]
    inside = max((depth for depth, (_, _, name) in enumerate(frames, 1) if name == "forward"), default=0)
    kept = [traceback.FrameSummary(*frame, lookup_line=False) for frame in reversed(frames[:inside])]
    return traceback.StackSummary.from_list(kept)
