"""The recipe: from a model and one microbatch to the pass graphs of all stages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zbcompile.passes.capture.autocast_casts import merge_autocast_casts
from zbcompile.passes.check import check_pass_graphs
from zbcompile.passes.compile_options import Policy
from zbcompile.passes.cost.hardware import Hardware, default_hardware
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.partition.assign_stages import assign_stages, keep_updated_buffers
from zbcompile.passes.partition.balance_stages import balanced_cuts, node_loads
from zbcompile.passes.partition.cut_points import ForwardLine, forward_line
from zbcompile.passes.recompute.recompute import policies_of, recompute as duplicate_recomputed
from zbcompile.passes.split.defer_sums import defer_sums
from zbcompile.passes.split.split_backward import split_backward, split_convolutions
from zbcompile.passes.split.tied_gradients import label_tied_gradients
from zbcompile.passes.stage.extract import extract
from zbcompile.passes.stage.pass_graph import PassGraph
from zbcompile.passes.step_graph import Label, StepGraph

# Receives the name of a pass that has ended, and what it changed or returned.
Observer = Callable[[str, Any], None]
PASSES = {  # in order: what each does
    "export": "traces forward, loss and gradients",
    "copy": "copies the graph for one placement",
    "defer_sums": "sums gradients over ranks once per step (not exact)",
    "merge_autocast_casts": "casts a weight under autocast once",
    "split_convolutions": "separates the gradients of convolutions",
    "forward_line": "finds the places where the model can be cut",
    "assign_stages": "balances the cuts, assigns nodes to stages",
    "keep_updated_buffers": "keeps what the backward reads of buffers",
    "split_backward": "labels weight gradients W, the rest B",
    "label_tied_gradients": "sums gradients of shared weights per stage",
    "recompute": "lets the backward compute values again",
    "extract": "makes the graphs F, B, W and BW of stages",
    "check_pass_graphs": "checks what all passes read and return",
    "sink_waits": "moves waits for collectives behind other work",
    "accumulate": "adds gradients into their buffers",
}


def no_observer(name: str, artifact: Any) -> None:
    """Does nothing after a pass."""


@dataclass(frozen=True)
class CompiledStep:
    """The pass graphs of a training step, by stage and kind, and the graph they were made from.

    Attributes:
        passes: F, B, W and E of every stage, in the order in which one microbatch runs them.
        fused: BW of every stage: B and W in one graph.
        ranks_of: The rank of each stage.
        line: The forward operations in the order in which they are cut, and `cuts`: the numbers of
            operations before each cut.
        loads: The seconds of each operation of the line with its backward.
        parts: With `exact=True`, the stages that compute parts of a gradient which is added at the
            end of the step, by parameter.
        saved_without_recompute: The bytes that each stage would keep for its backward if it
            recomputed nothing.
    """

    step: StepGraph
    passes: Mapping[Label, PassGraph]
    fused: Mapping[int, PassGraph]
    ranks_of: tuple[int, ...]
    line: ForwardLine
    cuts: tuple[int, ...]
    loads: Sequence[float]
    parts: Mapping[str, frozenset[int]]
    saved_without_recompute: Mapping[int, int]

    @property
    def stages(self) -> int:
        return len(self.ranks_of)


def compile_graph(
    step: StepGraph,
    *,
    ranks_of: Sequence[int],
    exact: bool = False,
    recompute: Policy | Sequence[Policy] = "hints",
    choose_cuts: Callable[[StepGraph, ForwardLine], Sequence[int]] | None = None,
    hardware: Hardware | None = None,
    observe: Observer = no_observer,
) -> CompiledStep:
    """Compiles an exported training step. The passes change its graph in place.

    Args:
        choose_cuts: Returns the cuts of the line; balanced if None.
        hardware: The machine whose seconds are balanced; a nominal one if None.
        observe: Called after each pass.
    """
    hardware = hardware or default_hardware(step.device_type)
    if exact:
        for sentence in step.inexact_calls:
            raise CaptureError(sentence)
    else:
        defer_sums(step)
        observe("defer_sums", step)
    merge_autocast_casts(step)
    observe("merge_autocast_casts", step)
    split_convolutions(step)
    observe("split_convolutions", step)
    line = forward_line(step)
    observe("forward_line", step)
    if choose_cuts is not None:
        cuts = tuple(choose_cuts(step, line))
    else:
        cuts = balanced_cuts(step, line, ranks_of, hardware)
    loads = node_loads(step, line, hardware)
    stages = assign_stages(step, line, cuts)
    observe("assign_stages", step)
    keep_updated_buffers(step, stages)
    observe("keep_updated_buffers", step)
    labels = split_backward(step, stages)
    observe("split_backward", labels)
    parts = label_tied_gradients(step, labels, exact)
    observe("label_tied_gradients", labels)
    policies = policies_of(recompute, len(ranks_of))
    saved = duplicate_recomputed(step, labels, policies, hardware)
    observe("recompute", labels)
    passes, fused = extract(step, labels)
    observe("extract", [*passes.values(), *fused.values()])
    check_pass_graphs(step, passes)
    observe("check_pass_graphs", [*passes.values(), *fused.values()])
    return CompiledStep(step, passes, fused, tuple(ranks_of), line, cuts, loads, parts, saved)
