"""The passes of the compiler, in order, and what holds after each. `python -m zbcompile.inspect --passes` prints this.

A model is captured, made canonical and cut into stages. Each stage that differs from the others in more than names
goes through STAGE_PASSES. The compiler runs the objects of these lists.
"""

from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch.fx import Graph

from zbcompile.passes.capture import canonical
from zbcompile.passes.capture.canonical import Canonical
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
from zbcompile.passes.split.simplify import simplify
from zbcompile.passes.split.split import split
from zbcompile.passes.stage.deduplicate import renamed
from zbcompile.passes.stage.joint_segments import trace_in_segments
from zbcompile.passes.stage.overlap import merge
from zbcompile.passes.stage.stage_program import finish_stage
from zbcompile.passes.verification import (
    graph_rules as graph,
    model_rules as model,
    piece_rules as piece,
    stage_rules as stage,
)
from zbcompile.passes.verification.rule import Rule
from zbcompile.passes.vocabulary.shard_program import make_vocabulary
from zbcompile.passes.vocabulary.trunk import cut_off


@dataclass(frozen=True)
class StageTask:
    """The inputs of the passes of a stage, besides the stage itself: trainable parameters, choices, the fake gradients
    that arrive, what the graphs call each process group of this process, the parameters of several stages, and the
    segments of stages that were traced."""

    trainable: frozenset[str]
    choices: Choices
    tangents: Mapping[str, torch.Tensor]
    dimensions: Mapping[str, str] = field(default_factory=dict)
    several: frozenset[str] = frozenset()
    segments: MutableMapping[Hashable, object] = field(default_factory=dict)


_GRAPH = (graph.operations_in_order, graph.calls_only, graph.roles_complete, graph.roles_allowed)
_NAMED = (*_GRAPH, graph.roles_on_inputs, graph.roles_unique)
WHOLE = (*_NAMED, graph.values_present, graph.parts_fit, graph.collectives_waited)
_PURE = (*WHOLE, graph.nothing_in_place)
_COPIED = (*_GRAPH, graph.roles_on_inputs)
_CANONICAL = (*_PURE, model.differentiability_known)


def _changing(name: str, does: str, change: Callable[[Graph], None], *holds: Rule) -> Pass:
    """A canonicalisation that changes the graph in place, and may drop inputs."""
    return Pass(name, does, canonical.on_graph(change), holds)


def _in_turn(*passes: Pass) -> tuple[Pass, ...]:
    """Several passes over one graph, as one pass. The rules of each still hold after the passes that follow it."""
    rules = accumulate((each.holds for each in passes), lambda held, new: tuple(dict.fromkeys((*held, *new))))
    return tuple(replace(each, holds=holds) for each, holds in zip(passes, rules, strict=True))


_JOINT = (*_PURE, stage.joint_listed, stage.stage_inside, stage.gradients_fit, stage.forward_alone)
_REWRITTEN = (*_JOINT, stage.draws_unchanged)
_WAITING = (piece.draws_in_forward, piece.saved_arrives, piece.crossing_counted)
_SPLIT = (*_PURE, piece.each_operation_once, piece.repeats_cheap, piece.fused_is_both, piece.draws_all, *_WAITING)
_FINISHED = (
    *(*WHOLE, *_WAITING, piece.only_buffers_written, piece.gradients_complete, piece.gradients_own),
    piece.messages_described,
)


# The table of contents.
CAPTURE = Pass("capture", "traces one microbatch's training step", capture, _GRAPH)
CAPTURE_INFERENCE = Pass("capture", "traces the forward alone", capture_inference, _GRAPH)
CANONICALISE = _in_turn(
    Pass("copy", "copies the graph, inputs named by role", canonical.copy_graph, _COPIED),
    _changing("keep-marks", "records checkpoint and autocast regions", canonical.keep_marks),
    _changing("merge-tied", "one input per tensor, tied or not", canonical.merge_tied_placeholders, graph.roles_unique),
    _changing("drop-checks", "drops checks of shapes", canonical.drop_checks, model.no_runtime_checks),
    _changing("merge-views", "merges views that a write repeats", merge_remade_views),
    _changing(
        "open-copies", "gives writes into slices a derivative", make_copies_differentiable, model.copies_differentiable
    ),
    _changing("strided-writes", "gives strided writes a gradient", correct_strided_writes),
    _changing("keep-strides", "keeps the strides of what is written", keep_strides_of_writes),
    _changing("mark-bases", "marks tensors that are written through views", mark_written_bases),
    Pass(
        "separate-buffers",
        "copies views of buffers that change",
        canonical.with_separate_buffers,
        (model.changing_buffers_separate,),
    ),
    Pass("write-early", "detaches new values of buffers early", canonical.with_early_writes, ()),
    _changing("order-draws", "draws a mask in the order of its memory", draw_in_memory_order),
    _changing("drop-no-ops", "drops casts to the same dtype and the like", canonical.drop_no_ops),
    _changing("drop-dead-code", "drops what no result needs", canonical.drop_dead_code, model.nothing_unused),
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
STAGE_PASSES = (  # each receives the result of the one before it, and the task
    Pass(
        "joint",
        "traces the backward after the forward",
        lambda stage, t: trace_in_segments(stage, t.trainable, t.tangents, t.choices.exact, t.dimensions, t.segments),
        _JOINT,
    ),
    Pass("simplify", "drops double transposes and equal views", lambda joint, _: simplify(joint), _REWRITTEN),
    Pass("defer-sums", "sums over ranks once per step", lambda joint, t: defer_sums(joint, t.several), _REWRITTEN),
    Pass(
        "recompute",
        "lets the backward recompute values",
        lambda joint, t: recompute(joint, t.choices.recompute_of(joint.stage.index), t.choices.hardware),
        _REWRITTEN,
    ),
    Pass("split", "makes F, B, W and BW", lambda joint, t: split(joint), _SPLIT),
    Pass("accumulate", "adds gradients into their buffers", lambda made, t: finish_stage(made, t.choices), _FINISHED),
)
DEDUPLICATE = Pass("deduplicate", "reuses the graphs of an equal stage", renamed, _FINISHED)
SHARD = Pass(
    "shard",
    "makes S and T of every vocabulary shard",
    make_vocabulary,
    (*WHOLE, piece.only_buffers_written, piece.words_covered),
)
OVERLAP = Pass(
    "overlap",
    "merges the two passes of a pair",
    lambda pair: merge(*pair),
    (graph.operations_in_order, graph.collectives_waited, piece.halves_complete),
)

PASSES = (*(CAPTURE, *CANONICALISE, TRUNK, CUT, SEPARATE_USES), *(*STAGE_PASSES, DEDUPLICATE, SHARD, OVERLAP))


def canonicalise(captured: Captured, manager: PassManager = SILENT) -> Canonical:
    """The canonical form of `captured`, which is not changed. Raises CaptureError if no stage can compute it."""
    canonical: Canonical = manager.run_all(CANONICALISE, captured)[-1]
    return canonical
