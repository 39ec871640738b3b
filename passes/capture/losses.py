"""Losses: where a model returns its loss, and loss modules with parameters.

Such a module is the submodule `loss` of its model; forward does not see it.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from zbcompile.passes.capture.unsupported import (
    LOSS_HAS_A_SHAPE,
    LOSS_IN_A_SEQUENCE,
    LOSS_IS_AN_INTEGER,
    LOSS_IS_NO_TENSOR,
    LOSS_NAME_IS_TAKEN,
    NO_LOSS,
    NOTHING_TO_TRAIN,
)
from zbcompile.passes.errors import CaptureError

_JOINED = "_joined_loss"  # in a model with a loss as its submodule `loss`, and in copies of it


def loss_in(output: Any) -> Tensor:
    """Returns the loss in a model's output: the output itself, its entry or attribute `loss`, or
    the first entry of a tuple."""
    if isinstance(output, Tensor):
        return output
    is_mapping = isinstance(output, Mapping)
    loss = output.get("loss") if is_mapping else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if not isinstance(loss, Tensor):
        raise CaptureError(NO_LOSS.format(kind=type(output).__name__))
    return loss


def check_loss(loss: Any) -> None:
    """Raises CaptureError unless a loss is a floating-point number with a gradient."""
    if not isinstance(loss, Tensor):
        raise CaptureError(LOSS_IS_NO_TENSOR.format(kind=type(loss).__name__))
    if not loss.is_floating_point():
        raise CaptureError(LOSS_IS_AN_INTEGER.format(dtype=loss.dtype))
    if loss.numel() != 1:
        raise CaptureError(LOSS_HAS_A_SHAPE.format(shape=tuple(loss.shape)))
    if not loss.requires_grad:
        raise CaptureError(NOTHING_TO_TRAIN)


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


@contextlib.contextmanager
def without_joined_loss(model: nn.Module) -> Iterator[None]:
    """Context in which a model does not have the loss that it was joined with."""
    attributes, modules = vars(model), vars(model)["_modules"]
    loss = attributes.get(_JOINED)
    if loss is None or modules.get("loss") is not loss:
        yield
        return
    del modules["loss"], attributes[_JOINED]
    try:
        yield
    finally:
        modules["loss"] = attributes[_JOINED] = loss
