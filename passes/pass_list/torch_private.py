"""Every private PyTorch name that this room uses, with the reason and the versions that have it."""

import contextlib
import copy
import sys
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.fx import _symbolic_trace
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor

from zbcompile.passes.torch_private import replaced


@contextlib.contextmanager
def quick_traces() -> Iterator[None]:
    """Inside, torch's traces do without what nobody reads: code of their graphs; `tensor_meta` beside `val`; copies of
    what a node is from; stack frames outside of the model; the stack of the place where a fake mode was made; patches
    that do nothing (2.11-2.13)."""
    shared = SimpleNamespace(copy=copy.copy, deepcopy=lambda sources: sources)
    with (
        _use_lazy_graph_module(True),
        replaced(proxy_tensor, "_extract_tensor_metadata", lambda _: None),
        replaced(proxy_tensor, "dispatch_trace", _trace),
        replaced(fake_tensor, "traceback", SimpleNamespace(extract_stack=list, format_list=traceback.format_list)),
        replaced(torch.fx.traceback, "copy", shared),
        replaced(torch.fx.proxy, "CapturedTraceback", SimpleNamespace(extract=lambda: SimpleNamespace(summary=_stack))),
    ):
        yield


def _stack() -> traceback.StackSummary:
    """Where a trace is, from the first `forward` inwards; the lines of source are read when they are printed."""
    frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(sys._getframe(1))]
    inside = max((depth for depth, (_, _, name) in enumerate(frames, 1) if name == "forward"), default=0)
    kept = [traceback.FrameSummary(*frame, lookup_line=False) for frame in reversed(frames[:inside])]
    return traceback.StackSummary.from_list(kept)


_torchs_trace, _torchs_patcher = proxy_tensor.dispatch_trace, _symbolic_trace._new_patcher


def _trace(root: Any, tracer: Any, concrete_args: Any = None) -> torch.fx.GraphModule:
    """For every trace torch replaces `nn.Module.__call__` and `__getattr__`. Each assignment makes Python update all
    subclasses of nn.Module, which are thousands once many graphs are alive. A plain PythonKeyTracer passes both through
    unchanged; tracers derived from it do not (2.11-2.13)."""
    plain = type(tracer) is proxy_tensor.PythonKeyTracer
    with replaced(_symbolic_trace, "_new_patcher", _patcher_of_functions if plain else _torchs_patcher):
        return _torchs_trace(root, tracer, concrete_args)


@contextlib.contextmanager
def _patcher_of_functions() -> Iterator[Any]:
    """Traces inside of this one get torch's own; where one outside has replaced the methods, they must be covered."""
    untouched = torch.nn.Module.__call__ is _symbolic_trace._orig_module_call
    with replaced(_symbolic_trace, "_new_patcher", _torchs_patcher), _torchs_patcher() as patcher:
        patch = patcher.patch_method
        patcher.patch_method = lambda owner, *given, **how: (  # type: ignore[method-assign]
            None if untouched and owner is torch.nn.Module else patch(owner, *given, **how)
        )
        yield patcher
