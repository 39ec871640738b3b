"""The batches of a run: those of the data function, from the step at which the run continues."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zbcompile.errors import PipelineError
from zbcompile.torch_private import pytree

Batch = tuple[tuple[Any, ...], dict[str, Any]]
EXPECTED = (
    "expected (args, kwargs), a tuple and a mapping, or one mapping of keywords, as pipe.step takes them (the loss's "
    'target as the keyword "target")'
)


@dataclass(frozen=True)
class Start:
    """The start of a run: the first step, the seed, the number of this replica and of all. `state` is the data source's
    `state_dict` from the checkpoint, None if it has none."""

    step: int
    seed: int
    replica: int = 0
    replicas: int = 1
    state: Any = None


class Data:
    """An iterator over batches. `skips` says whether it had to draw the batches of the steps before, and drop them."""

    def __init__(self, source: Any, name: str, start: Start) -> None:
        keywords = _keywords(source, start) if _is_function(source) else {}
        self.name, self.step = name, start.step
        self._batches: Iterable[Any] = _called(source, keywords, name) if _is_function(source) else source
        stateful = hasattr(self._batches, "state_dict") and hasattr(self._batches, "load_state_dict")
        self._state: Callable[[], Any] | None = self._batches.state_dict if stateful else None  # type: ignore[attr-defined]
        if stateful and start.state is not None:
            self._batches.load_state_dict(start.state)  # type: ignore[attr-defined]
        self._iterator = self._begin()
        self.skips = not stateful and "start" not in keywords
        for step in range(start.step if self.skips else 0):
            self._draw(step)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = as_batch(self._draw(self.step), f"batch {self.step} of {self.name}")
        self.step += 1
        return batch

    def state(self) -> Any:
        """The data source's `state_dict()`, or None if it is not stateful."""
        return None if self._state is None else self._state()

    def _begin(self) -> Iterator[Any]:
        try:
            return iter(self._batches)
        except TypeError:
            raise PipelineError(
                f"{self.name} gives a {type(self._batches).__name__}; expected an iterable of batches, or a function "
                "that returns one."
            ) from None

    def _draw(self, step: int) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            raise PipelineError(
                f"{self.name} ended after {step} batches; the run needs one for every step. Let it start over at the "
                "end, or ask for fewer --steps."
            ) from None


def _is_function(source: Any) -> bool:
    return callable(source) and not hasattr(source, "__iter__")


def _keywords(function: Callable[..., Any], start: Start) -> dict[str, Any]:
    """The known values for which the function has parameters."""
    known = {"start": start.step, "seed": start.seed, "replica": start.replica, "replicas": start.replicas}
    taken = inspect.signature(function).parameters
    return {name: value for name, value in known.items() if name in taken}


def _called(function: Callable[..., Any], keywords: Mapping[str, Any], name: str) -> Any:
    try:
        return function(**keywords)
    except TypeError as error:
        raise PipelineError(
            f"calling {name} with {', '.join(keywords) or 'no arguments'} failed: {error}. It may have parameters "
            "called start, seed, replica and replicas; others need defaults."
        ) from error


def as_batch(given: Any, where: str) -> Batch:
    """An item of a data function as the arguments of `pipe.step`. Raises PipelineError for another form.

    >>> as_batch({"x": 1}, "batch 0")
    ((), {'x': 1})
    """
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, (tuple, list)) and len(given) == 2:
        args, kwargs = given
        if isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping):
            return tuple(args), dict(kwargs)
    found = f"a {type(given).__name__}"
    if isinstance(given, (tuple, list)):
        found += f" of {', '.join(type(each).__name__ for each in given)}"
    raise PipelineError(f"{where} is {found}; {EXPECTED}.")


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on the device of the pipeline."""
    moved: Batch = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), batch)
    return moved
