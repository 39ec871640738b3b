"""Log-probabilities of given labels, computed where the logits are: what a forward-only program may return instead of
the model's output.

They are written so that `zbcompile.passes.vocabulary.exits` finds the exits of the logits in them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from zbcompile.passes.capture_refusals import Refusal
from zbcompile.passes.graph.fx import output_values
from zbcompile.passes.graph.process_groups import is_collective
from zbcompile.passes.partition.stage_graphs import Stage
from zbcompile.passes.torch_names import type_text
from zbcompile.passes.vocabulary.logits import NORMALISATIONS

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


def require_whole_logits(stages: Sequence[Stage], sharded: Collection[str]) -> None:
    """Raise CaptureError if the log-probabilities are of one rank's part of the logits: if its part of a weight among
    `sharded` makes them, and nothing is exchanged in between."""
    for index, node in ((stage.index, node) for stage in stages for node in stage.module.graph.nodes):
        makers = _makers(stages, index, node.all_input_nodes[0]) if node.target in NORMALISATIONS else set()
        for name in sorted(makers.intersection(sharded)):
            raise Refusal.PART_OF_LOGITS.error(parameter=name)


def _makers(stages: Sequence[Stage], index: int, node: Node) -> set[str]:
    """The parameters that the operation behind a node of stage `index` reads: the first one of several inputs."""
    node = _origin(stages, index, node)
    behind = [_origin(stages, index, each) for each in node.all_input_nodes if not is_collective(node)]
    return {each.meta["slot"].name for each in behind if each.op == "placeholder"}


def _origin(stages: Sequence[Stage], index: int, node: Node) -> Node:
    """Where the value of a node comes from through operations of one input, in earlier stages, too."""
    while len(node.all_input_nodes) == 1 and not is_collective(node):
        (node,) = node.all_input_nodes
    if node.op != "placeholder" or node.meta["slot"].kind != "activation" or index == 0:
        return node
    before = stages[index - 1]
    made = dict(zip(before.outputs, output_values(before.module.graph), strict=True))
    return _origin(stages, index - 1, made[node.meta["slot"]])  # type: ignore[arg-type]


def logits_in(output: Any) -> torch.Tensor:
    """The logits in a model's output: the output itself, or its `logits` entry or attribute. Raises CaptureError."""
    found = output
    if not isinstance(output, torch.Tensor):
        found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(found, torch.Tensor):
        raise Refusal.NO_LOGITS.error(kind=type(output).__name__)
    if found.ndim < 2 or not found.is_floating_point():
        raise Refusal.LOGITS_SHAPE.error(found=type_text(found))
    return found


def _require_labels(logits: torch.Tensor, labels: Any) -> None:
    what = type(labels).__name__
    if isinstance(labels, torch.Tensor):
        what = type_text(labels)
        if labels.shape == logits.shape[:-1] and labels.dtype in INTEGERS:
            return
    of_logits = {"logits": list(logits.shape), "shape": list(logits.shape[:-1])}
    raise Refusal.LABELS.error(found=what, ignored=IGNORED, **of_logits)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
