"""Running a model's Python without leaving a trace in the model."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator

from torch import nn


@contextlib.contextmanager
def modules_restored(model: nn.Module) -> Iterator[None]:
    """On exit, restore every module's attributes and hooks and every parameter's `requires_grad`.

    A forward counts calls, fills lists and installs hooks (transformers does when it first runs). Tensors written in
    place keep what was written.
    """
    undo = [_undo(module) for module in model.modules()]
    trains = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for each in undo:
            each()
        for parameter, before in trains:
            parameter.requires_grad_(before)


def _undo(module: nn.Module) -> Callable[[], None]:
    """A function that restores the attributes of `module`, and the entries of the tables and lists among them."""
    attributes = dict(vars(module))
    tables = [(value, dict(value)) for value in attributes.values() if type(value) in (dict, OrderedDict)]
    lists = [(value, list(value)) for value in attributes.values() if type(value) is list]

    def undo() -> None:
        vars(module).clear()
        vars(module).update(attributes)
        for table, entries in tables:
            table.clear()
            table.update(entries)
        for values, elements in lists:
            values[:] = elements

    return undo
