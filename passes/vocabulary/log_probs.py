"""Log-probabilities of given labels, computed where the logits are: what a forward-only program may return instead of
the model's output.

Both are written so that `zbcompile.passes.vocabulary.logits` finds the exits of the logits in them.
"""

from collections.abc import Mapping
from typing import Any

import torch

from zbcompile.passes.errors import CaptureError

IGNORED = -100
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def log_probs(output: Any, labels: Any) -> tuple[torch.Tensor, int]:
    """log p(labels[b, t] | logits[b, t]) of every token, 0 for ignored labels, and the number of words.

    Logits of less than fp32 are normalised in fp32. Raises CaptureError for an output without logits, and for labels of
    another shape.
    """
    logits = logits_in(output)
    _require_labels(logits, labels)
    labels = labels.long()  # a small type has no number for IGNORED, nor for every word
    inside = (labels >= 0) & (labels < logits.shape[-1])
    normal = torch.log_softmax(logits, -1, dtype=_wide(logits.dtype))
    found = normal.gather(-1, torch.where(inside, labels, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, found, 0.0), logits.shape[-1]


def log_probs_and_entropies(output: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """As `log_probs`, with the entropy of every token's distribution (in nats), whatever its label."""
    found, words = log_probs(output, labels)
    logits = logits_in(output)
    chances = torch.softmax(logits, -1, dtype=_wide(logits.dtype))
    return found, torch.special.entr(chances).sum(-1), words


def logits_in(output: Any) -> torch.Tensor:
    """The logits in a model's output: the output itself, or its `logits` entry or attribute. Raises CaptureError."""
    found = output
    if not isinstance(output, torch.Tensor):
        found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(found, torch.Tensor):
        raise CaptureError(
            f"the model returned {type(output).__name__} without logits; expected a tensor [..., words], or a mapping "
            "or object with .logits. Return them, or leave out the argument that makes forward return the loss alone."
        )
    if found.ndim < 2 or not found.is_floating_point():
        raise CaptureError(
            f"the model returned {str(found.dtype).removeprefix('torch.')}{list(found.shape)}, which is no logits; "
            "expected floating-point [..., words] with a score for every word. Return the output layer's result."
        )
    return found


def _require_labels(logits: torch.Tensor, labels: Any) -> None:
    what = type(labels).__name__
    if isinstance(labels, torch.Tensor):
        what = f"{str(labels.dtype).removeprefix('torch.')}{list(labels.shape)}"
        if labels.shape == logits.shape[:-1] and labels.dtype in INTEGERS:
            return
    raise CaptureError(
        f"labels= is {what} and the logits are {list(logits.shape)}; expected the number of a word for every token, "
        f"integers {list(logits.shape[:-1])} ({IGNORED} where there is none)."
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
