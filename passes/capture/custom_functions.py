"""torch.autograd.Function inside a model: each call is one operator of the captured graph.

The kernel of `zbcompile::function` is the Function itself. It stands above autograd, like that of aten.linear, so that
torch.export keeps the call whole, and tracing a joint graph runs its real forward and backward: both become ordinary
operations, and nothing of the Function is left. An operator takes tensors and strings only; the rest of a call is found
by its name in a table, which forgets a call with the graph that it was captured for.

    with calls_as_operators(found):              # around torch.export.export
        ...                                      # MyFunction.apply(x, 2.0) becomes function([x], "MyFunction#7")
    captured.functions                           # keeps what is in `found` for as long as the graph
"""

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.checkpoint import CheckpointFunction

from zbcompile.passes.graph.fx import like
from zbcompile.passes.torch_private import (
    FakeTensorMode,
    composite_operator,
    instead_of_function_apply,
    is_traced,
    nowhere_traced,
    pytree,
)

_numbers = itertools.count()
_calls: "WeakValueDictionary[str, FunctionCall]" = WeakValueDictionary()


class _Tensor:
    """Stands for a tensor among the arguments of a call."""


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """All of a call of `function` but its tensors. `leaves` are its arguments, flattened, with `_Tensor` per tensor;
    `autocast` is what surrounds it: device, dtype, enabled, cached."""

    name: str
    function: type[torch.autograd.Function]
    leaves: tuple[Any, ...]
    structure: Any
    autocast: tuple[str, torch.dtype, bool, bool]

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        given = iter(tensors)
        leaves = [next(given) if leaf is _Tensor else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        with torch.autocast(*self.autocast):
            return self.function.apply(*args, **kwargs)

    @property
    def key(self) -> Hashable:
        leaves = tuple((type(leaf), _by_value(leaf)) for leaf in self.leaves)
        return self.function, leaves, self.structure, self.autocast


def _by_value(leaf: Any) -> Hashable:
    """What tells arguments apart: numbers by their text (0.0 is not -0.0), what has no value of its own by identity."""
    if isinstance(leaf, int | float | complex | str | bytes | torch.dtype | torch.device | None):
        return repr(leaf)
    return id(leaf)


def _kernel(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    return _tensors_in(_calls[name](tensors))


_OPERATOR = composite_operator("function(Tensor[] tensors, str call) -> Tensor[]", _kernel)
_RANDOM = composite_operator("random_function(Tensor[] tensors, str call) -> Tensor[]", _kernel, draws=True)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def calls_as_operators(found: dict[Hashable, FunctionCall], ignored: Callable[[type], bool]) -> Iterator[None]:
    """Inside, what torch.export traces of a Function's call is one operator; equal calls have equal names.

    `found` receives the calls by their keys and must live as long as the graph. A call without gradients is its forward
    alone, which is traced through like any other code; so are Functions that are `ignored`.
    """

    def apply(original: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (is_traced() and torch.is_grad_enabled()) or ignored(function):
            return original(*args, **kwargs)
        if function is CheckpointFunction:
            return _checkpointed(*args)
        return _as_operator(found, function, args, kwargs)

    with instead_of_function_apply(apply):
        yield


def _checkpointed(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """`torch.utils.checkpoint` with re-entry: a region that the backward recomputes. As in eager, nothing inside gets a
    gradient unless one of its inputs does."""
    reached = any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
    if not reached:
        with torch.no_grad():
            return run(*args)
    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _as_operator(found: dict[Hashable, FunctionCall], function: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = tuple(_Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    autocast = _autocast_on(tensors[0].device.type if tensors else "cpu")
    new = FunctionCall(f"{function.__qualname__}#{next(_numbers)}", function, others, structure, autocast)
    call = found.setdefault(new.key, new)
    _calls[call.name] = call
    results = iter(_OPERATOR(tensors, call.name))
    leaves, structure = pytree.tree_flatten(_tried(call, tensors))
    leaves = [next(results) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(leaves, structure)


def _autocast_on(device: str) -> tuple[str, torch.dtype, bool, bool]:
    enabled, cached = torch.is_autocast_enabled(device), torch.is_autocast_cache_enabled()
    return device, torch.get_autocast_dtype(device), enabled, cached


def _tried(call: FunctionCall, tensors: list[torch.Tensor]) -> Any:
    """What `call` returns, run on fake tensors and traced by nothing."""
    with nowhere_traced(), FakeTensorMode(allow_non_fake_inputs=True):
        return call([like(tensor).requires_grad_(tensor.requires_grad) for tensor in tensors])
