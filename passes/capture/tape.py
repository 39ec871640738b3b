"""A tape of operations that Python code has run, to run them again on other tensors without the code."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from zbcompile.passes.graph.fx import draws
from zbcompile.passes.torch_private import (
    FUNCTIONAL_COLLECTIVES,
    UNSAFE_VIEW,
    FakeTensor,
    TorchDispatchMode,
    is_in_place,
    nowhere_traced,
    pytree,
)

_SAME: dict[Any, Any] = {UNSAFE_VIEW: torch.ops.aten.view.default}  # a matmul has either, as it is traced
_BATCH_NORMS = ("native_batch_norm.", "cudnn_batch_norm.", "miopen_batch_norm.", "_native_batch_norm_legit.")

_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


@dataclass(frozen=True)
class Place:
    """Stands for a tensor: an input of the tape, or a result of one of its operations."""

    number: int

    def __repr__(self) -> str:
        return f"%{self.number}"


class Tape(TorchDispatchMode):
    """Records the operations that run inside. `places` numbers the tensors that are known, by identity; a tape that
    goes on where another one ended shares them.

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
