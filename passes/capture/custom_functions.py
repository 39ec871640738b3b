"""torch.autograd.Function inside a model: each call is one operator of the captured graph.

The kernel of `zbcompile::function` is the Function itself. It stands above autograd, like that of aten.linear, so that
torch.export keeps the call whole, and tracing a joint graph runs its real forward and backward: both become ordinary
operations, and nothing of the Function is left. An operator takes tensors and strings only; the rest of a call is found
by its name in a table, which forgets a call with the graph that it was captured for.

    with calls_as_operators(found, model, ignored):  # around torch.export.export
        ...                                          # MyFunction.apply(x, 2.0) becomes function([x], "MyFunction#7")
    captured.functions                               # keeps what is in `found` for as long as the graph
"""

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.fx import Node
from torch.utils.checkpoint import CheckpointFunction

from zbcompile.passes.capture.distributed_regions import RegionCall
from zbcompile.passes.capture.function_calls import FunctionCall, Inside, Outside
from zbcompile.passes.capture.function_trial import confirm, tried
from zbcompile.passes.capture.torch_private import (
    below_autograd,
    composite_operator,
    instead_of_function_apply,
    is_traced,
)
from zbcompile.passes.graph.fx import like
from zbcompile.passes.torch_private import pytree

_numbers = itertools.count()
_calls: "WeakValueDictionary[str, FunctionCall | RegionCall]" = WeakValueDictionary()


def _kernel(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    call = _calls[name]
    if below_autograd():  # a graph is rewritten, and forward may compute gradients itself
        return [like(result) for result in call.results]
    return [leaf for leaf in pytree.tree_leaves(call(tensors)) if isinstance(leaf, torch.Tensor)]


_OPERATOR = composite_operator("function(Tensor[] tensors, str call) -> Tensor[]", _kernel)
_RANDOM = composite_operator("random_function(Tensor[] tensors, str call) -> Tensor[]", _kernel, draws=True)


def confirm_call(target: object, args: tuple[Any, ...]) -> None:
    """Raise CaptureError if a Function whose operator `target` is does something else than where forward called it."""
    call = _calls[args[1]] if target in (_OPERATOR, _RANDOM) else None
    if isinstance(call, FunctionCall):
        confirm(call)


def is_call(node: Node) -> bool:
    """Whether a node is an operator that stands for a call."""
    return node.target in (_OPERATOR, _RANDOM)


def kernel_of_call(target: object) -> Callable[..., Any] | None:
    """What an operator that stands for a call does, in Python; None for any other."""
    return _kernel if target in (_OPERATOR, _RANDOM) else None


def form_of(node: Node) -> Hashable:
    """Equal for operators that compute alike on tensors of equal form."""
    tensors, name = node.args
    return _calls[str(name)].form, tuple(str(a.meta["val"]) + str(a.meta["differentiable"]) for a in tensors)  # type: ignore


def overwritten_by(node: Node) -> list[Node]:
    """What the exchange of a Function writes into: nothing else may read it, since in the graph it does not change."""
    if not is_call(node):
        return []
    tensors, name = node.args
    return [tensors[i] for i in _calls[str(name)].overwrites]  # type: ignore[index, misc]


@contextlib.contextmanager
def calls_as_operators(
    found: dict[Hashable, FunctionCall], model: nn.Module, ignored: Callable[[type], bool]
) -> Iterator[None]:
    """Inside, what torch.export traces of a Function's call is one operator; equal calls have equal names.

    `found` receives the calls by their keys and must live as long as the graph. A call without gradients, or for
    arguments that need none, is its forward alone, which is traced through like any other code; so are Functions that
    are `ignored`.
    """

    def apply(original: Callable[..., Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (is_traced() and torch.is_grad_enabled()) or ignored(function):
            with Inside(lambda tensor: tensor) if is_traced() else contextlib.nullcontext():
                return original(*args, **kwargs)
        if function is CheckpointFunction:
            return _checkpointed(*args)
        if not _gets_gradients(args):  # traced through, since a result may share memory with an argument
            with torch.no_grad(), Inside(lambda tensor: tensor):
                return original(*args, **kwargs)
        return _as_operator(found, model, function, (args, kwargs))

    with instead_of_function_apply(apply):
        yield


def _gets_gradients(args: tuple[Any, ...]) -> bool:
    """Whether autograd calls the backward of a Function: never for what is nested in an argument, or around it."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)


def _checkpointed(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """`torch.utils.checkpoint` with re-entry: a region that the backward recomputes. As in eager, nothing inside gets a
    gradient unless one of its inputs does."""
    if not _gets_gradients(args):
        with torch.no_grad():
            return run(*args)
    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _as_operator(found: dict[Hashable, FunctionCall], model: nn.Module, function: Any, given: Any) -> Any:
    leaves, structure = pytree.tree_flatten(given)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    new, result = tried(function, leaves, structure, Outside(model))
    call = found.setdefault(new.key, new)
    return _emitted(call, [*tensors, *new.outside.tensors], result, function.__qualname__)


def emit_into(found: dict[Hashable, Any]) -> Callable[[RegionCall, list[torch.Tensor], Any], Any]:
    """What makes the operators of modules that compute with DTensors; `found` as for `calls_as_operators`."""

    def emit(call: RegionCall, tensors: list[torch.Tensor], result: Any) -> Any:
        return _emitted(found.setdefault(call.key, call), tensors, result, type(call.module).__name__)

    return emit


def _emitted(call: Any, tensors: list[torch.Tensor], result: Any, title: str) -> Any:
    """The results of the operator, put together as those of the call itself are."""
    call.name = call.name or f"{title}#{next(_numbers)}"
    _calls[call.name] = call
    operator = _RANDOM if call.draws else _OPERATOR
    results = iter(operator(tensors, call.name))
    leaves, structure = pytree.tree_flatten(result)
    leaves = [next(results) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(leaves, structure)
