"""Modules that compute with DTensors: each call is one operator of the captured graph, as that of an autograd.Function.

A module parallelised by `torch.distributed.tensor.parallel` turns plain tensors into DTensors, computes, and gives
plain tensors back. Its forward, with the parameters' parts wrapped, is the kernel of the operator; tracing a joint
graph runs DTensor's real forward and backward, of which plain operations and collectives are left. If DTensors pass
from one module to the next, the smallest module around them is the operator: so no cut ever meets a DTensor.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zbcompile.passes.capture.opaque_calls import A_TENSOR, Autocast, OpaqueCall, OpaqueCalls, autocast_on, emitted
from zbcompile.passes.capture.tape import Tape
from zbcompile.passes.capture.torch_private import instead_of_module_call, is_traced, nowhere_traced
from zbcompile.passes.graph.fx import like
from zbcompile.passes.torch_private import FakeTensorMode, forward_hook_functions, own_parameters, pytree

PART = "part_of"  # see `zbcompile.model.distributed_tensors`


@dataclass(frozen=True)
class _Region:
    """A call of `module`, but for its tensors; `parts` says what its parameters are parts of. `before` are calls that
    hand it DTensors, each with the number of its tensors; `tail` is what follows it if its result is a DTensor: the
    loss."""

    module: nn.Module
    leaves: tuple[Any, ...]
    structure: Any
    names: tuple[str, ...]
    parts: tuple[Any, ...]
    autocast: Autocast
    before: tuple[tuple[OpaqueCall, int], ...]
    tail: Callable[..., Any] | None

    def run(self, tensors: list[torch.Tensor]) -> Any:
        count = sum(leaf is A_TENSOR for leaf in self.leaves)
        given, end = iter(tensors[:count]), count + len(self.names)
        earlier = self._earlier(tensors[end:])
        kinds = {A_TENSOR: given, PendingCall: earlier}
        leaves = [next(kinds[leaf]) if leaf is A_TENSOR or leaf is PendingCall else leaf for leaf in self.leaves]
        args, kwargs, rest = pytree.tree_unflatten(leaves, self.structure)
        pairs = zip(self.names, self.parts, tensors[count:end], strict=True)
        state = {name: tensor if part is None else part.wrap(tensor) for name, part, tensor in pairs}
        with torch.autocast(*self.autocast):
            result = torch.func.functional_call(self.module, state, args, kwargs)
            return result if self.tail is None else pytree.tree_map(_whole, self.tail(result, *rest))

    def _earlier(self, tensors: list[torch.Tensor]) -> Iterator[Any]:
        """The DTensors that calls before this one hand on."""
        for call, count in self.before:
            yield call.run(tensors[:count])
            tensors = tensors[count:]

    def call(self, tensors: list[torch.Tensor]) -> tuple[OpaqueCall, Any]:
        """The operator, and what the call returns, with fake tensors."""
        tape = Tape({})
        with nowhere_traced(), FakeTensorMode(allow_non_fake_inputs=True), tape:
            result = self.run([like(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors])
        results = tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        title = type(self.module).__name__
        return OpaqueCall(title, self.run, results, tape.random, form=self._form(results)), result

    def _form(self, results: tuple[torch.Tensor, ...]) -> str:
        """Equal for calls of layers alike. What a module of several does may hang on more than shows."""
        if self.before or self.tail is not None or any(self.module.children()):
            return ""
        placements = [part and (part.whole.placements, part.whole.device_mesh) for part in self.parts]
        return str((self.module, self.leaves, self.structure, self.autocast, placements, results))


@dataclass
class _Entry:
    """A module's call in the trial."""

    module: nn.Module
    given: list[Any]  # the DTensors among its arguments
    touches: bool
    result: Any = None
    inner: list["_Entry"] = field(default_factory=list)


class _RegionTrial(TorchFunctionMode):
    """Runs the model on fake DTensors and notes which module's code meets them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.root = _Entry(model, [], False)
        self.stack = [self.root]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _distributed_in((args, kwargs)):
            self.stack[-1].touches = True
        return func(*args, **(kwargs or {}))

    def call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        entry = _Entry(module, _distributed_in((args, kwargs)), _is_parallelised(module))
        self.stack[-1].inner.append(entry)
        self.stack.append(entry)
        try:
            result = original(module, *args, **kwargs)
        finally:
            self.stack.pop()
        entry.result = result
        return result


def _whole(value: Any) -> Any:
    return value.full_tensor() if _distributed_in(value) else value


def _distributed_in(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if hasattr(leaf, "device_mesh") and hasattr(leaf, "to_local")]


def _is_parallelised(module: nn.Module) -> bool:
    """Whether a module has parts of its own, or hooks of torch's parallel styles."""
    hooks = forward_hook_functions(module)
    own = any(hasattr(tensor, PART) for tensor in own_parameters(module))
    return own or any(getattr(hook, "__module__", "").startswith("torch.distributed.tensor") for hook in hooks)


Regions = dict[int, dict[str, Any]]  # id of a module -> its parameters by name, each with what it is a part of


def regions_of(model: nn.Module, args: Any, kwargs: Any) -> Regions:
    """The modules whose calls are operators."""
    if not any(hasattr(tensor, PART) for tensor in model.parameters()):  # parts of DTensors
        return {}
    trial = _RegionTrial(model)
    with (
        instead_of_module_call(trial.call),
        nowhere_traced(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
    ):
        args, kwargs = pytree.tree_map_only(torch.Tensor, like, (args, kwargs))
        state = {name: _wrapped(tensor) for name, tensor in model.named_parameters()}
        with trial:
            torch.func.functional_call(model, state, args, kwargs)
    whole = trial.root.inner[0]
    found = _cover(whole, whole.result) or [model]
    return {id(m): {name: getattr(p, PART, None) for name, p in m.named_parameters()} for m in found}


def _wrapped(tensor: torch.Tensor) -> Any:
    part = getattr(tensor, PART, None)
    return like(tensor) if part is None else part.wrap(like(tensor))


def _cover(entry: _Entry, last: Any) -> list[nn.Module] | None:
    """The smallest modules that contain all DTensors of a call, or hand them to the next such module; None if there
    are none such: DTensors enter or leave. What the model returns, `last`, goes to the loss, and counts as plain."""
    if not entry.touches:
        found = [_cover(each, last) or _handed_on(each, entry.inner, last) for each in entry.inner]
        if all(each is not None for each in found):
            return [module for each in found for module in each or []]
    leaves_plain = entry.result is last or not _distributed_in(entry.result)
    return [entry.module] if leaves_plain and not entry.given else None


def _handed_on(entry: _Entry, siblings: list[_Entry], last: Any) -> list[nn.Module] | None:
    """A module whose DTensors come from sibling modules, and go to exactly one of these."""
    if not entry.given and not _distributed_in(entry.result):
        return _cover(entry, last)
    known = all(any(each.result is given for each in siblings) for given in entry.given)
    readers = sum(any(given is entry.result for given in each.given) for each in siblings)
    leaves_well = entry.result is last or not _distributed_in(entry.result) or readers == 1
    return [entry.module] if known and leaves_well else None


@contextlib.contextmanager
def modules_as_operators(found: OpaqueCalls, regions: Regions) -> Iterator[None]:
    """Inside, calls of these modules are operators, which `found` receives."""

    def call(original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        if id(module) not in regions or not is_traced():
            return original(module, *args, **kwargs)
        return _as_operator(found, module, regions[id(module)], args, kwargs)

    with instead_of_module_call(call) if regions else contextlib.nullcontext():
        yield


@dataclass(frozen=True)
class PendingCall:
    """A DTensor that leaves a module: the call becomes one operator with what reads it. `again` emits the call."""

    again: Callable[..., Any]
    call: OpaqueCall
    tensors: list[torch.Tensor]

    def finish(self, tail: Callable[..., Any], *rest: Any) -> Any:
        """`tail(the DTensor, *rest)`, as plain tensors."""
        return self.again(tail, rest)


def _as_operator(
    found: OpaqueCalls,
    module: nn.Module,
    parts: dict[str, Any],
    args: Any,
    kwargs: Any,
    tail: Callable[..., Any] | None = None,
    rest: Any = (),
) -> Any:
    """The operator of a module's call; `parts` says what its parameters are parts of."""
    leaves, structure = pytree.tree_flatten((args, kwargs, rest))
    held = dict(module.named_parameters())
    before = [leaf for leaf in leaves if isinstance(leaf, PendingCall)]
    own = [*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *held.values()]
    tensors = [*own, *(tensor for each in before for tensor in each.tensors)]
    others = tuple(_stands_for(leaf) for leaf in leaves)
    autocast = autocast_on(tensors[0].device.type)
    earlier = tuple((each.call, len(each.tensors)) for each in before)
    of_parts = tuple(parts[name] for name in held)
    region = _Region(module, others, structure, tuple(held), of_parts, autocast, earlier, tail)
    call, result = region.call(tensors)
    if not _distributed_in(result):
        return emitted(found, call, tensors, result)
    return PendingCall(partial(_as_operator, found, module, parts, args, kwargs), call, tensors)


def _stands_for(leaf: Any) -> Any:
    if isinstance(leaf, PendingCall):
        return PendingCall
    return A_TENSOR if isinstance(leaf, torch.Tensor) else leaf
