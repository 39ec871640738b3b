"""Calls that a trace does not look into: an autograd.Function, or a module that computes with DTensors, each one
operator of the captured graph.

The kernel of `zbcompile::function` is the call itself. It stands above autograd, like that of aten.linear, so that
torch.export keeps it whole, and tracing a joint graph runs its real forward and backward: both become ordinary
operations, and nothing of the operator is left. An operator takes tensors and strings only; the rest of a call is found
by its name in a table, which forgets a call with the graph that it was captured for.

What `OpaqueCall.run` does differs between the two, and must. The Python code of a Function runs once and its backward
with the ctx of that run, so both are on tapes (`function_calls`). A module with DTensors runs again in every trace: the
proof of placements reads, of every operation inside, which gradient arrives for which value and along which dimensions
it is replicated as a DTensor (`zbcompile.passes.split.gradient_flow`), and a tape has nothing left of that. Operators
of torch.library (Triton's kernels too) and flex_attention need neither: torch.export keeps them whole, with their own
derivative.
"""

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import Node

from zbcompile.passes.capture.torch_private import below_autograd, composite_operator
from zbcompile.passes.graph.fx import like
from zbcompile.passes.torch_private import pytree

Autocast = tuple[str, torch.dtype, bool, bool]  # device, dtype, enabled, cached


@dataclass(eq=False)
class OpaqueCall:
    """A call with its own derivative, but for its tensors: `run` computes it for others.

    `results` are fake tensors like what it returns, `draws` says whether it draws random numbers, `overwrites` numbers
    the tensors that an exchange in it writes into. `text` is equal for calls, also of several captures, that compute
    alike ("" if there are no others), `form` for those that cost alike.
    """

    title: str
    run: Callable[[list[Tensor]], Any]
    results: tuple[Tensor, ...] = ()
    draws: bool = False
    overwrites: tuple[int, ...] = ()
    text: str = ""
    form: Hashable = None
    name: str = ""


_numbers = itertools.count()
_calls: "WeakValueDictionary[str, OpaqueCall]" = WeakValueDictionary()
OpaqueCalls = dict[Hashable, OpaqueCall]  # those of a capture: they must live as long as its graph


def _kernel(tensors: list[Tensor], name: str) -> list[Tensor]:
    call = _calls[name]
    if below_autograd():  # a graph is rewritten, and forward may compute gradients itself
        return [like(result) for result in call.results]
    return [leaf for leaf in pytree.tree_leaves(call.run(tensors)) if isinstance(leaf, Tensor)]


_OPERATOR = composite_operator("function(Tensor[] tensors, str call) -> Tensor[]", _kernel)
_RANDOM = composite_operator("random_function(Tensor[] tensors, str call) -> Tensor[]", _kernel, draws=True)


def emitted(found: OpaqueCalls, call: OpaqueCall, tensors: list[Tensor], result: Any) -> Any:
    """The results of the operator, put together as `result`, that of the call itself. Equal calls have equal names."""
    call = found.setdefault(call.text or id(call), call)
    call.name = call.name or f"{call.title}#{next(_numbers)}"
    _calls[call.name] = call
    results = iter((_RANDOM if call.draws else _OPERATOR)(tensors, call.name))
    leaves, structure = pytree.tree_flatten(result)
    leaves = [next(results) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(leaves, structure)


def autocast_on(device: str) -> Autocast:
    enabled, cached = torch.is_autocast_enabled(device), torch.is_autocast_cache_enabled()
    return device, torch.get_autocast_dtype(device), enabled, cached


def is_call(node: Node) -> bool:
    """Whether a node is an operator that stands for a call."""
    return node.target in (_OPERATOR, _RANDOM)


def kernel_of_call(target: object) -> Callable[..., Any] | None:
    """What an operator that stands for a call does, in Python; None for any other."""
    return _kernel if target in (_OPERATOR, _RANDOM) else None


def form_of(node: Node) -> Hashable:
    """Equal for operators that cost alike on tensors of equal form."""
    tensors, name = node.args
    call = _calls[str(name)]
    kinds = tuple(str(a.meta["val"]) + str(a.meta["differentiable"]) for a in tensors)  # type: ignore[union-attr]
    return call.form or call.name, kinds


def overwritten_by(node: Node) -> list[Node]:
    """The tensors that the exchange of a Function writes into. Nothing else may read them: in the graph they do not
    change."""
    if not is_call(node):
        return []
    tensors, name = node.args
    return [tensors[i] for i in _calls[str(name)].overwrites]  # type: ignore[index, misc]
