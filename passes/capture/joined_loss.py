"""A loss module with parameters, joined to its model as the submodule `loss`; forward does not see it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

_JOINED = "_joined_loss"  # in a model that trains with a loss as its submodule `loss`, and in copies of it


def join(model: nn.Module, loss: nn.Module) -> None:
    """Makes a loss the submodule `loss` of a model."""
    model.add_module("loss", loss)
    vars(model)[_JOINED] = loss


def without_joined_loss(model: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, a model has no loss that it was joined with."""
    own: dict[str, Any] = getattr(model, "__dict__", {})  # shared by the proxies that torch's tracer may hand out
    modules = own.get("_modules", {})
    loss = own.get(_JOINED)
    if loss is None or modules.get("loss") is not loss:
        return contextlib.nullcontext()
    return _without_loss(own, modules)


@contextlib.contextmanager
def _without_loss(own: dict[str, Any], modules: dict[str, Any]) -> Iterator[None]:
    before, loss = list(modules), modules["loss"]
    del modules["loss"], own[_JOINED]
    try:
        yield
    finally:
        now = {"loss": loss, **modules}
        modules.clear()  # in the same order as before
        modules.update({name: now[name] for name in (*before, *now) if name in now})
        own[_JOINED] = loss
