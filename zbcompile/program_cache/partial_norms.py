"""Refuses torch's `clip_grad_norm_` where other processes have gradients of the model too. It would
clip by the norm of this process alone."""

from collections.abc import Iterable, Sequence

import torch

from zbcompile.errors import PipelineError
from zbcompile.torch_private import before_clipping

_MARK = "zbcompile_norm_is_partial"


def mark_partial(parameters: Iterable[torch.Tensor]) -> None:
    """Lets torch's clipping refuse these parameters, however they are passed to it."""
    before_clipping(_refuse)
    for parameter in parameters:
        setattr(parameter, _MARK, True)


def unmark_partial(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        vars(parameter).pop(_MARK, None)


def _refuse(parameters: Sequence[torch.Tensor]) -> None:
    if any(hasattr(parameter, _MARK) for parameter in parameters):
        raise PipelineError(
            "torch's clip_grad_norm_ would clip by the norm of the gradients in this process, which"
            " differs from rank to rank. Call pipe.clip_grad_norm_(max_norm) on every rank, or pass"
            " clip= to pipe.optimizer."
        )
