"""Marks on backward nodes: the number of the forward operation whose gradient a node computes.

Autograd runs the backward of an operation inside its grad_fn. Hooks around every grad_fn annotate
the nodes traced in between. The sums that autograd adds between grad_fns stay unmarked, because
they belong to several forward operations.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zbcompile.passes.graph.fx import reached
from zbcompile.passes.graph.source_location import LINE
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.torch_private import (
    ANNOTATIONS,
    MODULES,
    annotations_of,
    remove_node_annotation,
    sequence_number,
    set_node_annotation,
)

BACKWARD_OF = "backward_of"  # key of an annotation: seq_nr of the forward node


def mark_backward_nodes(loss: Tensor) -> None:
    """Registers hooks so that a later backward of `loss` marks the nodes of every grad_fn."""
    for grad_fn in grad_fns_below(loss):
        number = sequence_number(grad_fn)
        grad_fn.register_prehook(lambda _, n=number: set_node_annotation(BACKWARD_OF, n))
        grad_fn.register_hook(lambda *_: remove_node_annotation(BACKWARD_OF))


def forward_number(node: torch.fx.Node) -> int | None:
    """Returns the seq_nr of the forward node of a backward node; None for a sum of gradients."""
    return annotations_of(node).get(BACKWARD_OF)


def is_gradient_sum(node: torch.fx.Node) -> bool:
    """Returns True for a sum that autograd adds between grad_fns for several uses of a value."""
    return node.target is torch.ops.aten.add.Tensor and forward_number(node) is None


def grad_fns_below(loss: Tensor) -> Iterable[Any]:
    """Returns every grad_fn from which `loss` is computed, once."""
    return reached(
        [] if loss.grad_fn is None else [loss.grad_fn],
        lambda grad_fn: [fn for fn, _ in grad_fn.next_functions if fn is not None],
    )


def trace_backward_to_forward(step: StepGraph) -> None:
    """Gives every backward node the module and the line of its forward node.

    A sum of gradients has those of its first operand, what begins the backward those of the loss.
    """
    backward = step.backward_nodes()
    sources = {n.meta.get("seq_nr"): n for n in reversed(step.calls()) if n not in backward}
    for node in backward:
        number = forward_number(node)
        operands = [source for source in node.all_input_nodes if source in backward]
        source = sources.get(number) if number is not None else next(iter(operands), None)
        meta = (source or step.loss or node).meta
        node.meta[MODULES] = meta.get(MODULES, {})
        line = meta.get(ANNOTATIONS, {}).get(LINE, "")
        node.meta[ANNOTATIONS] = {**node.meta[ANNOTATIONS], LINE: line}
