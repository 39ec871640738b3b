"""Log-probabilities of given labels, which a forward may return instead of the model's output."""

from collections.abc import Mapping
from typing import Any

import torch

from zbcompile.passes.errors import CaptureError
from zbcompile.passes.torch_collectives import is_dtensor
from zbcompile.passes.torch_names import type_text

IGNORED = -100
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
NO_LOGITS = (
    "the model returned {kind} without logits; expected a tensor [..., words], or a mapping or "
    "object with .logits. Return them, or leave out the argument that makes forward return the "
    "loss alone."
)
LOGITS_SHAPE = (
    "the model returned {found}, which is no logits; expected floating-point [..., words] with a "
    "score for every word. Return the output layer's result."
)
LABELS = (
    "labels= is {found} and the logits are {logits}; expected the number of a word for every "
    "token, integers {shape} ({ignored} where there is none)."
)


def log_probs(output: Any, labels: Any) -> tuple[torch.Tensor, int]:
    """Returns log p(labels[b, t] | logits[b, t]) of every token, 0 for ignored labels, and the
    number of words.

    Logits of less than fp32 are normalised in fp32. Raises CaptureError for an output without
    logits, and for labels of another shape.
    """
    logits = logits_in(output)
    _require_labels(logits, labels)
    labels = labels.long()  # a small type has no number for IGNORED, nor for every word
    inside = (labels >= 0) & (labels < logits.shape[-1])
    normal = torch.log_softmax(logits, -1, dtype=_wide(logits.dtype))
    picked = normal.gather(-1, torch.where(inside, labels, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, picked, 0.0), logits.shape[-1]


def log_probs_of_first_word(output: Any, _: Any) -> tuple[torch.Tensor, int]:
    """Returns log p(0 | logits[b, t]), which shows the output layer of a model without a loss."""
    logits = logits_in(output)
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return log_probs(logits, labels)


def logits_in(output: Any) -> torch.Tensor:
    """Returns the logits in a model's output: the output, or its entry or attribute `logits`.

    Raises CaptureError for an output without logits.
    """
    logits = output
    if not isinstance(output, torch.Tensor):
        logits = (
            output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        )
    if is_dtensor(logits):
        logits = logits.full_tensor()
    if not isinstance(logits, torch.Tensor):
        raise CaptureError(NO_LOGITS.format(kind=type(output).__name__))
    if logits.ndim < 2 or not logits.is_floating_point():
        raise CaptureError(LOGITS_SHAPE.format(found=type_text(logits)))
    return logits


def _require_labels(logits: torch.Tensor, labels: Any) -> None:
    what = type(labels).__name__
    if isinstance(labels, torch.Tensor):
        what = type_text(labels)
        if labels.shape == logits.shape[:-1] and labels.dtype in INTEGERS:
            return
    of_logits = {"logits": list(logits.shape), "shape": list(logits.shape[:-1])}
    raise CaptureError(LABELS.format(found=what, ignored=IGNORED, **of_logits))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
