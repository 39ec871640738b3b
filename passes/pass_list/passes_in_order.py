"""The passes of the compiler, in order, and what holds after each. `python -m zbcompile.inspect --passes` prints this.

A model is captured and made canonical, cut into stages, and every stage that differs from the others in more than names
goes through STAGE_PASSES. The compiler runs these very objects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from zbcompile.passes.capture import canonical
from zbcompile.passes.capture.canonical import Canonical, on_graph as _on
from zbcompile.passes.capture.export import Captured, capture, capture_inference
from zbcompile.passes.capture.functional_writes import (
    correct_strided_writes,
    draw_in_memory_order,
    keep_strides_of_writes,
    make_copies_differentiable,
    mark_written_bases,
    merge_remade_views,
)
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.partition.shared_parameters import separate_uses
from zbcompile.passes.partition.stage_graphs import cut
from zbcompile.passes.pass_list.run_passes import SILENT, Pass, PassManager
from zbcompile.passes.recompute.recompute import recompute
from zbcompile.passes.split.defer_sums import defer_sums
from zbcompile.passes.split.joint_graph import trace_joint
from zbcompile.passes.split.simplify import simplify
from zbcompile.passes.split.split import split
from zbcompile.passes.stage.deduplicate import renamed
from zbcompile.passes.stage.overlap import merge
from zbcompile.passes.stage.stage_program import finish_stage
from zbcompile.passes.verification import (
    graph_rules as graph,
    model_rules as model,
    piece_rules as piece,
    stage_rules as stage,
)
from zbcompile.passes.vocabulary.shard_program import make_vocabulary
from zbcompile.passes.vocabulary.trunk import cut_off


@dataclass(frozen=True)
class StageTask:
    """The inputs of the passes of a stage, beside the stage itself: trainable parameters, choices, the fake gradients
    that arrive, what the graphs call each process group of this process, and the parameters of several stages."""

    trainable: frozenset[str]
    choices: Choices
    tangents: Mapping[str, torch.Tensor]
    dimensions: Mapping[str, str] = field(default_factory=dict)
    several: frozenset[str] = frozenset()


_GRAPH = (graph.operations_in_order, graph.calls_only, graph.roles_complete, graph.roles_allowed)
_NAMED = (*_GRAPH, graph.roles_on_inputs, graph.roles_unique)
_WHOLE = (*_NAMED, graph.values_present, graph.parts_fit, graph.collectives_waited)
_PURE = (*_WHOLE, graph.nothing_in_place)
_COPIED = (*_GRAPH, graph.roles_on_inputs)
_CANONICAL = (*_PURE, model.differentiability_known)


def _in_turn(*passes: Pass) -> tuple[Pass, ...]:
    """Passes over one graph: the rules of each hold after all that follow it, too."""
    rules = accumulate((each.holds for each in passes), lambda held, new: tuple(dict.fromkeys((*held, *new))))
    return tuple(replace(each, holds=holds) for each, holds in zip(passes, rules, strict=True))


_JOINT = (*_PURE, stage.joint_listed, stage.stage_inside, stage.gradients_fit, stage.forward_alone)
_REWRITTEN = (*_JOINT, stage.draws_unchanged)
_WAITING = (piece.draws_in_forward, piece.saved_arrives, piece.crossing_counted)
_SPLIT = (*_PURE, piece.each_operation_once, piece.repeats_cheap, piece.fused_is_both, piece.draws_all, *_WAITING)
_FINISHED = (
    *(*_WHOLE, *_WAITING, piece.only_buffers_written, piece.gradients_complete, piece.gradients_own),
    piece.messages_described,
)


# The table of contents.
CAPTURE = Pass("capture", "traces one microbatch's training step", capture, _GRAPH)
CAPTURE_INFERENCE = Pass("capture", "traces the forward alone", capture_inference, _GRAPH)
CANONICALISE = _in_turn(
    Pass("copy", "copies the graph, inputs named by role", canonical.copy_graph, _COPIED),
    Pass("keep-marks", "records checkpoint and autocast regions", _on(canonical.keep_marks)),
    Pass(
        "merge-tied", "one input per tensor, tied or not", _on(canonical.merge_tied_placeholders), (graph.roles_unique,)
    ),
    Pass("drop-checks", "drops checks of shapes", _on(canonical.drop_checks), (model.no_runtime_checks,)),
    Pass("merge-views", "merges views that a write repeats", _on(merge_remade_views)),
    Pass(
        "open-copies",
        "gives writes into slices a derivative",
        _on(make_copies_differentiable),
        (model.copies_differentiable,),
    ),
    Pass("strided-writes", "gives strided writes a gradient", _on(correct_strided_writes)),
    Pass("keep-strides", "keeps the strides of what is written", _on(keep_strides_of_writes)),
    Pass("mark-bases", "marks tensors that are written through views", _on(mark_written_bases)),
    Pass(
        "separate-buffers",
        "copies views of buffers that change",
        canonical.with_separate_buffers,
        (model.changing_buffers_separate,),
    ),
    Pass("order-draws", "draws a mask in the order of its memory", _on(draw_in_memory_order)),
    Pass("drop-no-ops", "drops casts to the same dtype and the like", _on(canonical.drop_no_ops)),
    Pass("drop-dead-code", "drops what no result needs", _on(canonical.drop_dead_code), (model.nothing_unused,)),
    Pass("name-groups", "names groups by dimension of the mesh", canonical.with_named_groups, (model.groups_named,)),
    Pass("infer-values", "records values and where gradients flow", canonical.with_values, _CANONICAL),
)
TRUNK = Pass("trunk", "removes a sharded output layer", cut_off, _CANONICAL)
CUT = Pass(
    "cut", "makes one graph per stage", cut, (*_PURE, model.boundaries_agree, model.results_once, model.draws_kept)
)
SEPARATE_USES = Pass(
    "separate-uses", "marks parameters on several stages (exact)", separate_uses, (*_PURE, model.boundaries_agree)
)
STAGE_PASSES = (
    Pass(
        "joint",
        "traces the backward after the forward",
        lambda before, task: trace_joint(before, task.trainable, task.tangents, task.choices.exact, task.dimensions),
        _JOINT,
    ),
    Pass("simplify", "drops double transposes and equal views", lambda before, task: simplify(before), _REWRITTEN),
    Pass(
        "defer-sums", "sums over ranks once per step", lambda before, task: defer_sums(before, task.several), _REWRITTEN
    ),
    Pass(
        "recompute",
        "lets the backward recompute values",
        lambda before, task: recompute(before, task.choices.recompute),
        _REWRITTEN,
    ),
    Pass("split", "makes F, B, W and BW", lambda before, task: split(before, task.choices.weight_recompute), _SPLIT),
    Pass(
        "accumulate",
        "adds gradients into their buffers",
        lambda before, task: finish_stage(before, task.choices),
        _FINISHED,
    ),
)
DEDUPLICATE = Pass("deduplicate", "reuses the graphs of an equal stage", renamed, _FINISHED)
SHARD = Pass(
    "shard",
    "makes S and T of every vocabulary shard",
    make_vocabulary,
    (*_WHOLE, piece.only_buffers_written, piece.words_covered),
)
OVERLAP = Pass(
    "overlap",
    "merges the two passes of a pair",
    lambda pair: merge(*pair),
    (graph.operations_in_order, graph.collectives_waited, piece.halves_complete),
)

PASSES = (*(CAPTURE, *CANONICALISE, TRUNK, CUT, SEPARATE_USES), *(*STAGE_PASSES, DEDUPLICATE, SHARD, OVERLAP))
PASS_NAMES = tuple(each.name for each in PASSES)


def canonicalise(captured: Captured, manager: PassManager = SILENT) -> Canonical:
    """The canonical form of `captured`, which is not changed. Raises CaptureError if no stage can compute it."""
    canonical: Canonical = manager.run_all(CANONICALISE, captured)[-1]
    return canonical
