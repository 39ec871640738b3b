"""What a failed capture says about the batch that it was given."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zbcompile.batches.batch import Microbatch
from zbcompile.passes.errors import CaptureError


@contextmanager
def explained(
    model: nn.Module, microbatch: Microbatch, loss: Any, device: torch.device
) -> Iterator[None]:
    """Context for a capture. If it fails, its error says that inputs are on another device than the
    model (which is no error by itself: forward may move them), or that the target was forgotten or
    passed to forward.

    Raises CaptureError for an input on the meta device, which a capture would take for one on
    `device`.
    """
    tensors = microbatch.tensors.items()
    far = [f"{path} is on {t.device}" for path, t in tensors if t.dim() and t.device != device]
    hint = f"{', '.join(far)} and the model on {device}: pass tensor.to(pipe.device)."
    if any(tensor.is_meta for _, tensor in tensors) and device.type != "meta":
        raise CaptureError(hint)
    try:
        yield
    except CaptureError as error:
        args, kwargs, target = microbatch.example
        if not far:
            if loss is None or target is not None:
                raise
            hint = "The step got no target=, so loss=fn(output, target) received None."
            try:
                inspect.signature(model.forward).bind(*args, **kwargs)
            except TypeError:
                hint = (
                    "What loss=fn(output, target) compares with is passed as target=:"
                    " pipe.step(inputs, target=labels)."
                )
        raise CaptureError(f"{str(error).removesuffix('.')}. {hint}") from error
