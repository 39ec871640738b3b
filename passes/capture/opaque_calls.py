"""Calls that a trace does not look into: an autograd.Function, or a module that computes with DTensors, each one
operator of the captured graph.

The kernel of `zbcompile::function` is the call itself. It stands above autograd, like that of aten.linear, so that
torch.export keeps it whole, and tracing a joint graph runs its real forward and backward: both become ordinary
operations, and nothing of the operator is left. An operator takes tensors and strings only; the rest of a call is found
by its name in a table, which forgets a call with the graph that it was captured for.

What `OpaqueCall.run` does differs between the two. The Python code of a Function runs once and its backward with the
ctx of that run, so both are on tapes (`function_calls`). A module with DTensors runs again in every trace. Operators
of torch.library (Triton's kernels too) and flex_attention need neither: torch.export keeps them whole, with their own
derivative.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import Node

from zbcompile.passes.capture.torch_private import below_autograd, composite_operator
from zbcompile.passes.graph.fx import draws, like
from zbcompile.passes.torch_private import (
    FUNCTIONAL_COLLECTIVES,
    UNSAFE_VIEW,
    FakeTensor,
    TorchDispatchMode,
    is_in_place,
    nowhere_traced,
    pytree,
)

Autocast = tuple[str, torch.dtype, bool, bool]  # device, dtype, enabled, cached
_SAME: dict[Any, Any] = {UNSAFE_VIEW: torch.ops.aten.view.default}  # a matmul has either, as it is traced
_BATCH_NORMS = ("native_batch_norm.", "cudnn_batch_norm.", "miopen_batch_norm.", "_native_batch_norm_legit.")
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


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


_numbers = count()
_calls: "WeakValueDictionary[str, OpaqueCall]" = WeakValueDictionary()
OpaqueCalls = dict[Hashable, OpaqueCall]  # those of a capture: they must live as long as its graph


def _kernel(tensors: list[Tensor], name: str) -> list[Tensor]:
    call = _calls[name]
    if below_autograd():  # a graph is rewritten, and forward may compute gradients itself
        return [like(result) for result in call.results]
    return [leaf for leaf in pytree.tree_leaves(call.run(tensors)) if isinstance(leaf, Tensor)]


_OPERATOR = composite_operator("function(Tensor[] tensors, str call) -> Tensor[]", _kernel)
_RANDOM = composite_operator("random_function(Tensor[] tensors, str call) -> Tensor[]", _kernel, draws=True)


def emitted(found: OpaqueCalls, call: OpaqueCall, tensors: list[Tensor], result: Any, same: str = "") -> Any:
    """The results of the operator, put together as `result`, that of the call itself. Equal calls have equal names:
    those of equal texts, or of one `same` in this capture."""
    call = found.setdefault(call.text or same or id(call), call)
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


@dataclass(frozen=True)
class Place:
    """Stands for a tensor: an input of the tape, or a result of one of its operations."""

    number: int

    def __repr__(self) -> str:
        return f"%{self.number}"


class Tape(TorchDispatchMode):
    """Records the operations that run inside, to run them again on other tensors without the code that ran them.
    `places` numbers the tensors that are known, by identity; a tape that goes on where another one ended shares them.

    `random` says whether an operation drew random numbers, `exchanges` whether one was a collective, `statistics`
    whether a batch norm has updated its own, which its schema does not say.
    """

    def __init__(self, places: dict[int, int]) -> None:
        super().__init__()
        self.places = places
        self._numbers = count(max(places.values(), default=-1) + 1)
        self.steps: list[tuple[Callable[..., Any], Any, list[int]]] = []
        self.random = self.exchanges = self.statistics = False
        self._alive: list[Tensor] = []  # so that no other tensor gets the identity of one of these

    def place(self, tensor: Tensor) -> int:
        self._alive.append(tensor)
        if id(tensor) not in self.places:
            self.places[id(tensor)] = next(self._numbers)
        return self.places[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):  # a wrapper, which does the same to what it wraps
            return NotImplemented
        given = pytree.tree_map_only(Tensor, self._placed, (args, kwargs or {}))
        self.random = self.random or draws(func, args, kwargs or {})
        self.exchanges = self.exchanges or func.namespace in FUNCTIONAL_COLLECTIVES
        if func.__name__.startswith(_BATCH_NORMS):
            self.statistics = self.statistics or (isinstance(args[3], Tensor) and bool(args[5]))
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.detach.default and isinstance(given[0][0], Place):  # there is no history on a tape
            self._alive.append(result)
            self.places[id(result)] = given[0][0].number
            return result
        made = [self.place(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if made or is_in_place(func):  # anything else asks about a tensor
            self.steps.append((func, given, made))
        return result

    def _placed(self, tensor: Tensor) -> Any:
        number = self.places.get(id(tensor))
        if number is None and isinstance(tensor, FakeTensor):
            self._alive.append(tensor)
        return tensor if number is None else Place(number)

    def run(self, values: dict[int, Tensor]) -> None:
        """Run the operations again on `values`, by place, which receives all that they make."""
        for operation, given, made in self.steps:
            args, kwargs = pytree.tree_map_only(Place, lambda place: values[place.number], given)
            leaves = pytree.tree_leaves(operation(*args, **kwargs))
            values.update(zip(made, (leaf for leaf in leaves if isinstance(leaf, Tensor)), strict=True))

    def read(self) -> set[int]:
        """The places that the operations read."""
        leaves = pytree.tree_leaves([given for _, given, _ in self.steps])
        return {leaf.number for leaf in leaves if isinstance(leaf, Place)}

    @property
    def text(self) -> str:
        """A text that is equal for tapes with equal computations."""
        return "; ".join(
            f"{made} = {_SAME.get(operation, operation)} {pytree.tree_map_only(Tensor, _in_words, given)!r}"
            for operation, given, made in self.steps
        )


def _in_words(constant: Tensor) -> str:
    """A tensor that Python has made of numbers, as torch.tensor does."""
    with nowhere_traced():
        return f"{constant.dtype} {constant.tolist()}"
