"""Log-probabilities of given labels, which a forward may return instead of the model's output."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.errors import CaptureError
from zbcompile.passes.graph.fx import operator_name
from zbcompile.passes.graph.process_groups import is_collective
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.torch_collectives import is_dtensor
from zbcompile.passes.torch_names import type_text

IGNORED = -100
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


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
    wide = torch.promote_types(logits.dtype, torch.float32)
    normal = torch.log_softmax(logits, -1, dtype=wide)
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
        raise CaptureError(
            f"the model returned {type(output).__name__} without logits; expected a tensor "
            "[..., words], or a mapping or object with .logits. Return them, or leave out the "
            "argument that makes forward return the loss alone."
        )
    if logits.ndim < 2 or not logits.is_floating_point():
        raise CaptureError(
            f"the model returned {type_text(logits)}, which is no logits; expected floating-point "
            "[..., words] with a score for every word. Return the output layer's result."
        )
    return logits


def _require_labels(logits: torch.Tensor, labels: Any) -> None:
    what = type(labels).__name__
    if isinstance(labels, torch.Tensor):
        what = type_text(labels)
        if labels.shape == logits.shape[:-1] and labels.dtype in INTEGERS:
            return
    raise CaptureError(
        f"labels= is {what} and the logits are {list(logits.shape)}; expected the number of a word "
        f"for every token, integers {list(logits.shape[:-1])} ({IGNORED} where there is none)."
    )


def require_whole_logits(step: StepGraph, sharded: Collection[str]) -> None:
    """Raises CaptureError if a softmax is over the words of this rank alone: if its part of a
    parameter in `sharded` makes the logits, without an exchange in between."""
    parameters = {node: name for name, node in step.parameters.items()}
    for node in step.calls():
        if operator_name(node) not in ("_log_softmax", "_softmax"):
            continue
        for source in _origin(node.all_input_nodes[0]).all_input_nodes:
            name = parameters.get(_origin(source))
            if name in sharded:
                raise CaptureError(
                    f"the logits are this rank's part of them, by its part of {name}; a "
                    "distribution needs all words. Gather them in forward, or return the DTensor "
                    "(use_local_output=False)."
                )


def _origin(node: Node) -> Node:
    """Returns the node behind operations with one input."""
    while len(node.all_input_nodes) == 1 and not is_collective(node):
        (node,) = node.all_input_nodes
    return node
