"""A loss module with parameters is the submodule `loss` of its model; forward does not see it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from zbcompile.passes.capture.unsupported import LOSS_IN_A_SEQUENCE, LOSS_NAME_IS_TAKEN
from zbcompile.passes.errors import CaptureError

_JOINED = "_joined_loss"  # in a model with a loss as its submodule `loss`, and in copies of it


def join_loss(model: nn.Module, loss: Any) -> None:
    """Makes a loss module with parameters the submodule `loss` of the model.

    The last stage then has its parameters, which train and are saved as `loss.NAME`.

    Raises:
        CaptureError: The model has another attribute of that name, or runs all its submodules.
    """
    is_module = isinstance(loss, nn.Module)
    if not is_module or next(loss.parameters(), None) is None or loss in model.modules():
        return
    names = {"loss": type(loss).__name__, "model": type(model).__name__}
    if hasattr(model, "loss"):
        raise CaptureError(LOSS_NAME_IS_TAKEN.format(**names))
    if isinstance(model, nn.Sequential):
        raise CaptureError(LOSS_IN_A_SEQUENCE.format(**names))
    model.add_module("loss", loss)
    vars(model)[_JOINED] = loss


def without_joined_loss(model: Any) -> contextlib.AbstractContextManager[None]:
    """Context in which a model does not have the loss that it was joined with."""
    attributes: dict[str, Any] = getattr(model, "__dict__", {})
    modules = attributes.get("_modules", {})
    loss = attributes.get(_JOINED)
    if loss is None or modules.get("loss") is not loss:
        return contextlib.nullcontext()
    return _without_loss(attributes, modules)


@contextlib.contextmanager
def _without_loss(attributes: dict[str, Any], modules: dict[str, Any]) -> Iterator[None]:
    before, loss = list(modules), modules["loss"]
    del modules["loss"], attributes[_JOINED]
    try:
        yield
    finally:
        now = {"loss": loss, **modules}
        modules.clear()  # in the same order as before
        modules.update({name: now[name] for name in (*before, *now) if name in now})
        attributes[_JOINED] = loss
