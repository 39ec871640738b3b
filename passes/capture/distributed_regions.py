"""Modules that compute with DTensors: each call is one operator of the captured graph, as that of an autograd.Function.

A module parallelised by `torch.distributed.tensor.parallel` turns plain tensors into DTensors, computes, and gives
plain tensors back. Its forward, with the parameters' parts wrapped, is the kernel of the operator; tracing a joint
graph runs DTensor's real forward and backward, of which plain operations and collectives are left. If DTensors pass
from one module to the next, the smallest module around them is the operator: so no cut ever meets a DTensor.
"""

import contextlib
import functools
import hashlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zbcompile.passes.capture.opaque_calls import OpaqueCall, OpaqueCalls, Tape, autocast_on, emitted
from zbcompile.passes.capture.torch_private import instead_of_module_call, traced_graph
from zbcompile.passes.graph.fx import like
from zbcompile.passes.graph.storage import content_of
from zbcompile.passes.module_state import PLAIN
from zbcompile.passes.torch_private import FakeTensorMode, forward_hook_functions, nowhere_traced, pytree

PART = "part_of"  # see `zbcompile.model.distributed_tensors`


@dataclass(frozen=True)
class PendingCall:
    """A call that is not in the graph yet: `run` computes it for `tensors`, or others. In the traced model it stands
    for a DTensor that leaves a module; what reads it runs it first, in an operator of its own. `form` is equal for
    calls of layers that look equal, `text` for those that compute alike; "" if that may depend on more."""

    found: OpaqueCalls
    title: str
    run: Callable[[list[torch.Tensor]], Any]
    tensors: list[torch.Tensor]
    form: str
    text: str = ""

    def emit(self) -> Any:
        """Put the call into the graph as one operator and return what that returns; if that would be a DTensor, return
        the call."""
        tape = Tape({})
        with nowhere_traced(), FakeTensorMode(allow_non_fake_inputs=True), tape:
            result = self.run([like(tensor).requires_grad_(tensor.requires_grad) for tensor in self.tensors])
        if _distributed_in(result):
            return self
        results = tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        form = self.form and f"{self.form} {results}"
        call = OpaqueCall(self.title, self.run, results, tape.random, form=form)
        return emitted(self.found, call, self.tensors, result, self.text)

    def finish(self, tail: Callable[..., Any], *rest: Any) -> Any:
        """`tail(the DTensor, *rest)`, as plain tensors."""
        return _call(self.found, self.title, lambda *given: pytree.tree_map(_whole, tail(*given)), (self, *rest)).emit()


def _call(
    found: OpaqueCalls, title: str, function: Callable[..., Any], given: tuple[Any, ...], form: str = "", text: str = ""
) -> PendingCall:
    """`function(*given)`, with the autocast of now; what is pending among `given` is computed first."""
    leaves, structure = pytree.tree_flatten(given)
    per_leaf = [each.tensors if isinstance(each, PendingCall) else [each] for each in leaves]
    tensors = [each for several in per_leaf for each in several if isinstance(each, torch.Tensor)]
    readers, autocast = list(map(_reader, leaves)), autocast_on(tensors[0].device.type)

    def run(tensors: list[torch.Tensor]) -> Any:
        rest = iter(tensors)
        with torch.autocast(*autocast):
            return function(*pytree.tree_unflatten([read(rest) for read in readers], structure))

    if text := "" if any(isinstance(leaf, PendingCall) and not leaf.text for leaf in leaves) else text:
        values = [() if isinstance(leaf, torch.Tensor) else getattr(leaf, "text", leaf) for leaf in leaves]
        kinds = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]
        text = _text((text, values, str(structure), str(autocast), str(kinds)))
    return PendingCall(found, title, run, tensors, form and f"{form} {autocast}", text)


def _reader(leaf: Any) -> Callable[[Iterator[torch.Tensor]], Any]:
    """Takes the value of an argument from the tensors that are left."""
    if isinstance(leaf, PendingCall):
        run, count = leaf.run, len(leaf.tensors)
        return lambda rest: run(list(itertools.islice(rest, count)))
    return next if isinstance(leaf, torch.Tensor) else lambda _: leaf


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


Region = tuple[dict[str, Any], str]  # the parameters of a module by name, each with what it is a part of; its text
Regions = dict[int, Region]  # by the id of the module


def regions_of(model: nn.Module, args: Any, kwargs: Any) -> Regions:
    """The modules whose calls become operators. Their texts are those of now: in a trace buffers have no contents."""
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
    return {id(module): _region(module) for module in found}


def _region(module: nn.Module) -> Region:
    parts = {name: getattr(each, PART, None) for name, each in module.named_parameters()}
    wholes = [part.whole for part in parts.values() if part is not None]
    kinds = [str((whole.placements, whole.device_mesh, whole.shape, whole.stride())) for whole in wholes]
    return parts, _text(([part is None for part in parts.values()], kinds, module))


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
        return _module_call(found, module, regions[id(module)], args, kwargs).emit()

    with instead_of_module_call(call) if regions else contextlib.nullcontext():
        yield


def _module_call(
    found: OpaqueCalls, module: nn.Module, region: Region, args: Any, kwargs: dict[str, Any]
) -> PendingCall:
    """A call of a module in the traced model."""
    parts, text = region

    def run(args: Any, kwargs: dict[str, Any], held: dict[str, torch.Tensor]) -> Any:
        state = {name: part.wrap(held[name]) if (part := parts[name]) is not None else held[name] for name in held}
        return torch.func.functional_call(module, state, args, kwargs)

    given = args, kwargs, dict(module.named_parameters())
    placements = [part and (part.whole.placements, part.whole.device_mesh) for part in parts.values()]
    shown = module, pytree.tree_map_only(torch.Tensor, lambda _: torch.Tensor, (args, kwargs)), placements
    pending = any(isinstance(each, PendingCall) for each in pytree.tree_leaves((args, kwargs)))
    form = "" if pending or any(module.children()) else str(shown)
    return _call(found, type(module).__name__, run, given, form, text)


class _NoTextError(Exception):
    """A value is known by its identity alone."""


def _text(value: Any) -> str:
    """A text of all that a layer computes with besides its parameters; "" if something has none."""
    try:
        return repr(_described(value))
    except _NoTextError:
        return ""


def _code_digest(code: types.CodeType) -> str:
    constants = [_code_digest(each) if isinstance(each, types.CodeType) else each for each in code.co_consts]
    parts = code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _described(value: Any) -> Any:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, nn.Module):
        if getattr(sys.modules.get(type(value).__module__), type(value).__qualname__, None) is not type(value):
            raise _NoTextError  # another class may have its name
        state = {name: each for name, each in vars(value).items() if "state_dict" not in name and name != "_parameters"}
        return kind, _described(state)
    if isinstance(value, functools.partial):
        return kind, _described((value.func, value.args, value.keywords))
    if isinstance(value, types.FunctionType):
        around = [cell.cell_contents for cell in value.__closure__ or ()]
        return _code_digest(value.__code__), _described(
            (value.__module__, around, value.__defaults__, value.__kwdefaults__)
        )
    if isinstance(value, dict):  # hooks are under numbers that count all hooks of a process
        return [(key if isinstance(key, str) else "", _described(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | set):
        return kind, [_described(each) for each in value]
    if type(value) is torch.Tensor and not value.is_meta:  # a buffer, which counts as constant
        return kind, str((value.shape, value.dtype, value.device)), hashlib.sha256(content_of(value)).hexdigest()
    if hasattr(value, "mesh_dim_names") or hasattr(value, "is_shard"):  # a DeviceMesh, a Placement
        return kind, repr(value)
    if kind.startswith("torch.distributed.tensor."):  # a parallel style
        return kind, _described(vars(value))
    if type(value) not in (*PLAIN, float, complex):
        raise _NoTextError
    return kind, repr(value)
