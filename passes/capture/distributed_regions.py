"""Modules that compute with DTensors: each call is one operator of the captured graph, as that of an autograd.Function.

A module parallelised by `torch.distributed.tensor.parallel` turns plain tensors into DTensors, computes, and gives
plain tensors back. Its forward, with the parameters' parts wrapped, is the kernel of the operator; tracing a joint
graph runs DTensor's real forward and backward, of which plain operations and collectives are left. If DTensors pass
from one module to the next, the smallest module around them is the operator: so no cut ever meets a DTensor.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zbcompile.passes.capture.opaque_calls import A_TENSOR, Autocast, OpaqueCall, OpaqueCalls, autocast_on, emitted
from zbcompile.passes.capture.tape import Tape
from zbcompile.passes.capture.torch_private import instead_of_module_call, traced_graph
from zbcompile.passes.graph.fx import like
from zbcompile.passes.torch_private import FakeTensorMode, forward_hook_functions, nowhere_traced, pytree

PART = "part_of"  # see `zbcompile.model.distributed_tensors`


@dataclass(frozen=True)
class _Region:
    """What an operator computes: a call of `module`, whose tensors `run` is given.

    `leaves` and `structure` are the arguments, with A_TENSOR or PendingCall in the places of tensors; `names` are those
    of the module's parameters, and `parts` says of which DTensors they are parts. `before` are earlier calls whose
    DTensors are arguments, each with the number of its tensors. `tail` is what takes the result if that is a DTensor:
    the loss.
    """

    module: nn.Module
    leaves: tuple[Any, ...]
    structure: Any
    names: tuple[str, ...]
    parts: tuple[Any, ...]
    autocast: Autocast
    before: tuple[tuple[OpaqueCall, int], ...]
    tail: Callable[..., Any] | None

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """The result; `tensors` are those among the arguments, the parameters, and then those of the calls `before`."""
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
        """The DTensors that the calls before this one return."""
        for call, count in self.before:
            yield call.run(tensors[:count])
            tensors = tensors[count:]

    def traced(self, tensors: list[torch.Tensor]) -> tuple[OpaqueCall, Any]:
        """The operator, and what the call returns, with fake tensors."""
        tape = Tape({})
        with nowhere_traced(), FakeTensorMode(allow_non_fake_inputs=True), tape:
            result = self.run([like(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors])
        results = tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        title = type(self.module).__name__
        return OpaqueCall(title, self.run, results, tape.random, form=self._form(results)), result

    def _form(self, results: tuple[torch.Tensor, ...]) -> str:
        """A text that is equal for calls of equal layers; empty for a module with submodules, whose work may depend on
        more than its text shows."""
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
    own = any(hasattr(tensor, PART) for tensor in module.parameters(recurse=False))
    return own or any(getattr(hook, "__module__", "").startswith("torch.distributed.tensor") for hook in hooks)


Regions = dict[int, dict[str, Any]]  # id of a module -> its parameters by name, each with what it is a part of


def regions_of(model: nn.Module, args: Any, kwargs: Any) -> Regions:
    """The modules whose calls become operators: by the id of each, its parameters with the DTensors that they are parts
    of."""
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
    """The fewest modules such that every DTensor of a call stays inside one of them, or goes from one to the next; None
    if a DTensor enters or leaves the call. What the model returns, `last`, goes to the loss and may be a DTensor."""
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
        if id(module) not in regions or traced_graph() is None:
            return original(module, *args, **kwargs)
        return _ModuleCall(found, module, regions[id(module)], args, kwargs).as_operator()

    with instead_of_module_call(call) if regions else contextlib.nullcontext():
        yield


@dataclass(frozen=True)
class _ModuleCall:
    """A call of a module in the traced model; `parts` says of which DTensors its parameters are parts."""

    found: OpaqueCalls
    module: nn.Module
    parts: dict[str, Any]
    args: Any
    kwargs: Any

    def as_operator(self, tail: Callable[..., Any] | None = None, rest: tuple[Any, ...] = ()) -> Any:
        """Put one operator into the graph for the call, and for `tail(its result, *rest)` if that is given. Returns
        what the operator returns. If that would be a DTensor, nothing is put into the graph: returns a PendingCall,
        which becomes a part of the operator that reads it."""
        leaves, structure = pytree.tree_flatten((self.args, self.kwargs, rest))
        before = [leaf for leaf in leaves if isinstance(leaf, PendingCall)]
        held = dict(self.module.named_parameters())
        own = [*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), *held.values()]
        tensors = [*own, *(tensor for each in before for tensor in each.tensors)]
        region = _Region(
            module=self.module,
            leaves=tuple(_stands_for(leaf) for leaf in leaves),
            structure=structure,
            names=tuple(held),
            parts=tuple(self.parts[name] for name in held),
            autocast=autocast_on(tensors[0].device.type),
            before=tuple((each.operator, len(each.tensors)) for each in before),
            tail=tail,
        )
        operator, result = region.traced(tensors)
        if _distributed_in(result):
            return PendingCall(self, operator, tensors)
        return emitted(self.found, operator, tensors, result)


@dataclass(frozen=True)
class PendingCall:
    """Stands in the traced model for a DTensor that leaves a module. What reads it runs `operator` on `tensors` first,
    in an operator of its own."""

    source: _ModuleCall
    operator: OpaqueCall
    tensors: list[torch.Tensor]

    def finish(self, tail: Callable[..., Any], *rest: Any) -> Any:
        """`tail(the DTensor, *rest)`, as plain tensors."""
        return self.source.as_operator(tail, rest)


def _stands_for(leaf: Any) -> Any:
    if isinstance(leaf, PendingCall):
        return PendingCall
    return A_TENSOR if isinstance(leaf, torch.Tensor) else leaf
