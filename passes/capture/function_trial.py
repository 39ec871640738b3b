"""The trial of an autograd.Function where the model calls it: what it returns, reads, draws and leaves behind, found by
running forward and backward on fake tensors that nothing traces."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from zbcompile.passes.capture.function_calls import (
    A_TENSOR,
    Autocast,
    FunctionCall,
    Inside,
    Operations,
    Outside,
    kinds_of,
)
from zbcompile.passes.capture.torch_private import is_fake_of, nowhere_traced, written_so_far
from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import like
from zbcompile.passes.graph.source_location import calling_line, failing_line
from zbcompile.passes.torch_private import FakeTensorMode, pytree, single_threaded_backward


def tried(function: Any, leaves: Sequence[Any], structure: Any, outside: Outside) -> tuple[FunctionCall, Any]:
    """The call of `function` that forward makes, and what it returns, with fake tensors.

    Raises CaptureError for what would be lost: changes of its inputs, random numbers in the backward, and whatever
    cannot be traced.
    """
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    others = tuple(A_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    autocast = autocast_on(tensors[0].device.type if tensors else "cpu")
    call = FunctionCall(function, others, structure, autocast, outside, kinds_of(tensors), tensors)
    return call, _try(call)


def confirm(call: FunctionCall) -> None:
    """Raise CaptureError if the call, repeated after forward has left it, does something else."""
    before = call.outside
    again = replace(call, outside=Outside(before.model))
    _try(again, dict(zip(map(id, before.now()), before.tensors, strict=True)))
    if again.operations != call.operations:
        raise call.changed("does other operations")
    if list(map(id, again.outside.now())) != list(map(id, before.now())):
        raise call.changed("reads another tensor")


def _try(call: FunctionCall, earlier: Mapping[int, Tensor] = MappingProxyType({})) -> Any:
    """What the call returns. `earlier` are those that stood, while forward ran, for the tensors that the code finds
    now: a model on the meta device was not on it then."""
    with nowhere_traced(), FakeTensorMode(allow_non_fake_inputs=True) as mode, single_threaded_backward():
        return _Trial(call, mode, earlier).run()


def autocast_on(device: str) -> Autocast:
    enabled, cached = torch.is_autocast_enabled(device), torch.is_autocast_cache_enabled()
    return device, torch.get_autocast_dtype(device), enabled, cached


class _Trial:
    def __init__(self, call: FunctionCall, mode: FakeTensorMode, earlier: Mapping[int, Tensor]) -> None:
        self.call, self.mode, self.earlier = call, mode, earlier
        self.outside: dict[int, Tensor] = {}
        self.written: dict[int, int] = {}  # how often, when it was made

    def run(self) -> Any:
        given = self.call.tried_with = tuple(_fresh(tensor) for tensor in self.call.tried_with)
        result = self._forward(given)
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self._backward([tensor for tensor in results if tensor.requires_grad], given)
        self.call.results = tuple(tensor.detach() for tensor in results)
        leaves = [*given, *self.outside.values()]
        self.call.deposits = tuple(i for i, t in enumerate(leaves) if t.is_leaf and t.grad is not None)
        return result

    def _forward(self, given: tuple[Tensor, ...]) -> Any:
        before = [written_so_far(tensor) for tensor in given]
        try:
            with Operations() as operations:
                result = self._explained("forward", lambda: self.call.run(list(given), Inside(self._replaced)))
        finally:
            written = tuple(i for i, tensor in enumerate(given) if written_so_far(tensor) != before[i])
            if written and not operations.exchanges:
                raise self._refused(Refusal.FUNCTION_INPUT)
        if operations.statistics:
            raise self._refused(Refusal.FUNCTION_STATISTICS)
        self._refuse_written_outside()
        self.call.operations, self.call.draws = tuple(operations.seen), operations.random
        self.call.overwrites = written
        return result

    def _backward(self, results: list[Tensor], given: tuple[Tensor, ...]) -> None:
        wanted = [tensor for tensor in given if tensor.requires_grad]
        if not results:
            return
        before = [written_so_far(tensor) for tensor in given]
        with Operations() as operations:
            tangents = [torch.ones_like(result) for result in results]
            self._explained("backward", lambda: torch.autograd.grad(results, wanted, tangents, allow_unused=True))
        if operations.random:
            raise self._refused(Refusal.FUNCTION_RANDOM)
        if [written_so_far(tensor) for tensor in given] != before:
            raise self._refused(Refusal.FUNCTION_INPUT_LATER)
        self._refuse_written_outside()
        self.call.operations += ("backward", *operations.seen)

    def _refuse_written_outside(self) -> None:
        """What is written into a replacement would not be written into what it stands for."""
        if any(written_so_far(tensor) != self.written[place] for place, tensor in self.outside.items()):
            raise self._refused(Refusal.FUNCTION_AROUND)

    def _explained(self, part: str, run: Any) -> Any:
        try:
            return run()
        except Exception as error:
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            names = {"part": part, "line": failing_line(error), "error": reason}
            raise self._refused(Refusal.UNTRACED_FUNCTION, **names) from error

    def _refused(self, refusal: Refusal, **names: str) -> CaptureError:
        name = f"{self.call.function.__module__}.{self.call.function.__qualname__}"
        return refusal.error(function=f"{name} ({calling_line()})", **names)

    def _replaced(self, tensor: Tensor) -> Tensor:
        """A fake tensor for one from outside: not made by the trial."""
        if is_fake_of(tensor, self.mode) and id(tensor) not in self.earlier:
            return tensor
        if id(tensor) not in self.outside:
            self.call.outside.note(tensor)
            kind = self.earlier.get(id(tensor), tensor)
            replacement = self.outside[id(tensor)] = like(kind).requires_grad_(kind.requires_grad)
            self.written[id(tensor)] = written_so_far(replacement)
        return self.outside[id(tensor)]


def _fresh(tensor: Tensor) -> Tensor:
    """A fake tensor like one that autograd knows, a result of something if that is one."""
    new = like(tensor).requires_grad_(tensor.requires_grad)
    return new if tensor.is_leaf else new.view_as(new)
