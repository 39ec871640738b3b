"""The batches of a run: those of the data function, from the step at which the run continues."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from zbcompile.errors import PipelineError

Batch = tuple[tuple[Any, ...], dict[str, Any]]
EXPECTED = (
    "expected (args, kwargs), a tuple and a mapping, or one mapping of keywords, as pipe.step takes"
    ' them (the loss\'s target as the keyword "target")'
)


class Data:
    """An iterator over the batches from step `start` on. `state` is the data source's `state_dict`
    from the checkpoint, None if it has none. `skips` says whether it had to draw the batches of
    earlier steps, and drop them."""

    def __init__(self, source: Any, name: str, start: int, seed: int, state: Any = None) -> None:
        self.name, self.step, keywords = name, start, dict[str, int]()
        if callable(source) and not hasattr(source, "__iter__"):
            parameters = inspect.signature(source).parameters
            choices = {"start": start, "seed": seed}
            keywords = {key: value for key, value in choices.items() if key in parameters}
            source = _call(source, keywords, name)
        self._source = (
            source if hasattr(source, "state_dict") and hasattr(source, "load_state_dict") else None
        )
        if self._source is not None and state is not None:
            source.load_state_dict(state)
        try:
            self._iterator = iter(source)
        except TypeError:
            raise PipelineError(
                f"{name} gives a {type(source).__name__}; expected an iterable of batches, or a"
                " function that returns one."
            ) from None
        self.skips = self._source is None and "start" not in keywords
        for step in range(start if self.skips else 0):
            self._draw(step)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = as_batch(self._draw(self.step), f"batch {self.step} of {self.name}")
        self.step += 1
        return batch

    def state(self) -> Any:
        """Returns the data source's `state_dict()`, or None if it is not stateful."""
        return None if self._source is None else self._source.state_dict()

    def _draw(self, step: int) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            raise PipelineError(
                f"{self.name} ended after {step} batches; the run needs one for every step. Let it"
                " start over at the end, or ask for fewer --steps."
            ) from None


def _call(function: Any, keywords: Mapping[str, Any], name: str) -> Any:
    try:
        return function(**keywords)
    except TypeError as error:
        raise PipelineError(
            f"calling {name} with {', '.join(keywords) or 'no arguments'} failed: {error}. It may"
            " have parameters called start and seed; others need defaults."
        ) from error


def as_batch(item: Any, where: str) -> Batch:
    """Returns an item of a data function as the arguments of `pipe.step`. Raises PipelineError for
    another form.

    >>> as_batch({"x": 1}, "batch 0")
    ((), {'x': 1})
    """
    if isinstance(item, Mapping):
        return (), dict(item)
    if isinstance(item, (tuple, list)) and len(item) == 2:
        args, kwargs = item
        if isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping):
            return tuple(args), dict(kwargs)
    kind = f"a {type(item).__name__}"
    if isinstance(item, (tuple, list)):
        kind += f" of {', '.join(type(part).__name__ for part in item)}"
    raise PipelineError(f"{where} is {kind}; {EXPECTED}.")
