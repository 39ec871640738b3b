"""Runs a graph whose results have places: every operation writes into memory that a plan gives it.

An operation with an `out=` form writes into its place. The result of any other is copied there, and its own memory is
freed at once. Either way the same kernels run, so the bits are the same. Some `out=` forms resize or replace the tensor
that they are given, and would overwrite its neighbours; the first call finds them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Interpreter, Node

from zbcompile.passes.split.subgraphs import Piece
from zbcompile.torch_private import out_form

Places = Mapping[str, Sequence[torch.Tensor | None]]  # by operation, of each tensor that it makes; None: a view


class PlacedRun(Interpreter):
    """Runs a piece, as calls do: with a list of inputs, which it empties. `places` has those of its results."""

    def __init__(self, piece: Piece, places: Places) -> None:
        super().__init__(piece.module)
        self.places = places
        self.sound: dict[Node, bool] = {}  # whether the `out=` form of an operation writes its result alone

    def __call__(self, values: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.boxed_run(values)  # type: ignore[no-any-return]

    def run_node(self, n: Node) -> Any:
        places = self.places.get(n.name)
        if places is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        form = _form_of(n, places)
        if form is not None and self.sound.get(n):
            return form(args, kwargs, places)
        if form is not None and n not in self.sound:
            tried = [torch.empty_like(place) for place in places if place is not None]
            made = form(args, kwargs, tried)
            self.sound[n] = all(map(_is_untouched, tried, places))
        else:
            made = n.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(made, torch.Tensor):
            return _moved(made, places[0])
        left = iter(places)  # a backward returns None for gradients that nobody needs
        return type(made)(_moved(each, next(left)) if isinstance(each, torch.Tensor) else each for each in made)


def _form_of(node: Node, places: Sequence[torch.Tensor | None]) -> Any:
    """The `out=` form of an operation, if all of its results have places and none is a number, which is copied as
    quickly."""
    value = node.meta["val"]
    whole = isinstance(value, torch.Tensor) or len(value) == len(places)
    return out_form(node.target) if whole and all(p is not None and p.ndim for p in places) else None


def _is_untouched(tried: torch.Tensor, place: torch.Tensor | None) -> bool:
    """Whether an operation that wrote into `tried` instead of `place` has kept its shape and its storage."""
    assert place is not None
    same = tried.shape == place.shape and tried.stride() == place.stride()
    return same and tried.untyped_storage().nbytes() == torch.empty_like(place).untyped_storage().nbytes()


def _moved(made: torch.Tensor, place: torch.Tensor | None) -> torch.Tensor:
    return made if place is None else place.copy_(made)


def place_in(block: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """The tensor like `like` that lies in `block`, of bytes, its storage beginning at `offset`."""
    start = offset // like.dtype.itemsize + like.storage_offset()
    return block.view(like.dtype).as_strided(like.shape, like.stride(), start)
