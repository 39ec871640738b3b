"""Compiling the forward alone: a program without backward graphs, with parameters used where they train.

The forward of a batch is one program for each of its microbatches; a program that is there already divides it.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from zbcompile.batches.batch import Batch, Microbatch
from zbcompile.compiler.compile_model import (
    groups_of,
    labels_of,
    make_manager,
    on_mesh,
    output_of,
    place,
    without_autocast,
)
from zbcompile.compiler.cut_planning import plan_cuts
from zbcompile.compiler.torch_logs import without_torchs_logs
from zbcompile.compiler.vocabulary_sharding import VocabularySharding, forward_shards, shard_head
from zbcompile.errors import PipelineError
from zbcompile.model.model_info import facts_of
from zbcompile.passes.capture.canonical import Canonical
from zbcompile.passes.capture.questions import ForeignAnswers
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.partition.liveness import lay_out_line
from zbcompile.passes.partition.stage_graphs import Stage, assign_by_cuts, assign_by_parameters
from zbcompile.passes.pass_list.passes_in_order import CAPTURE_INFERENCE, CUT, canonicalise
from zbcompile.passes.pass_list.run_passes import PassManager
from zbcompile.passes.stage.stage_program import StageProgram, forward_programs, without_calls
from zbcompile.passes.vocabulary.log_probs import IGNORED, require_whole_logits
from zbcompile.passes.vocabulary.logits import NotShardable
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram, even_bounds
from zbcompile.program.directories import save_here
from zbcompile.program.output import FORWARDS
from zbcompile.program.program import Program, call_of, listed
from zbcompile.schedules import Placement, Schedule, lower
from zbcompile.schedules.generators.forward_only import forward_only


@dataclass(frozen=True)
class Frame:
    """What a forward is compiled for: the schedule whose stages and ranks it takes, `like` a program of the same model
    that has placed the parameters (None if the forward is partitioned on its own), the options, `dimensions` as in
    `Captured`, and the parameters that are `sharded` along any of them."""

    schedule: Schedule
    like: Program | None
    choices: Choices
    dimensions: Mapping[str, str]
    sharded: Collection[str] = ()


@without_torchs_logs()
def compile_forward(
    model: nn.Module, microbatch: Microbatch, computes: str, frame: Frame, given: ForeignAnswers | None = None
) -> Program:
    """The program of one microbatch. `given` answers for `capture_inference`."""
    args, kwargs, target = microbatch.example
    manager, like = make_manager(), frame.like
    read = FORWARDS[computes]
    captured = manager.run(CAPTURE_INFERENCE, model, args, kwargs, target, read, given)
    floats = frozenset(name for name, parameter in model.named_parameters() if parameter.is_floating_point())
    captured = replace(
        on_mesh(captured, frame.dimensions), trainable=floats
    )  # a frozen model is cut like one that trains
    with without_autocast(microbatch):
        canonical = canonicalise(captured, manager)
        sharding = _sharding(canonical, frame, manager)
        trunk = canonical if sharding is None else sharding.trunk
        line = lay_out_line(trunk)
        cuts = plan_cuts(line, frame.schedule, frame.choices) if like is None else like.cuts
        count = frame.schedule.stages
        assigned = assign_by_cuts(line, cuts) if like is None else assign_by_parameters(trunk, line, like.homes, count)
        stages: tuple[Stage, ...] = manager.run(CUT, trunk, line, assigned, count, False)
        stages = tuple(without_calls(stage, labels_of(canonical)) for stage in stages)
        if computes != "eval":
            require_whole_logits(stages, frame.sharded)
        programs = forward_programs(stages)
        _warn(stages)
        vocabulary = None
        if sharding is not None:
            placed = like.vocabulary if like is not None else None
            bounds = placed.bounds if placed is not None else even_bounds(sharding.head.size, frame.schedule.ranks)
            vocabulary = forward_shards(sharding, bounds, frame.choices, manager)
    return Program(
        model=facts_of(model, captured.constants),
        cuts=cuts,
        stages=programs,
        lowered=_in_order(frame.schedule.placement, programs, vocabulary, 1),
        homes=place(model, captured, stages, vocabulary) if like is None else like.homes,
        choices=frame.choices,
        loss_dtype="float32",
        inputs={path: (tuple(t.shape), str(t.dtype)) for path, t in microbatch.tensors.items()},
        vocabulary=vocabulary,
        canonical_targets=(),
        guards=captured.guards,
        call=call_of(microbatch),
        groups=groups_of(canonical, programs),
        changed_state=captured.changed_state,
        output=output_of(computes, captured, canonical, stages),
        writer=save_here,
    )


def compile_forwards(
    model: nn.Module, batch: Batch, count: int, computes: str, frame: Frame, given: ForeignAnswers | None = None
) -> tuple[Program, ...]:
    """The programs of the microbatches of a batch, right for batches that answer as the `guards` of the first one say.
    The answers are the batch's own, or those `given`; forward is asked about the batch as a whole, as in eager mode.

    There are `count` programs, the last of which may be for fewer rows, if every output has one row per sample. An
    output of another kind (a loss, say) is computed on the whole batch, so that it is what the model itself returns. So
    is a forward that changes buffers in eval mode, which a batch changes once.
    """
    whole = compile_forward(model, batch.whole, computes, frame, given)
    changes = any(stage.changed for stage in whole.stages)
    count = batch.most_parts(count, even=whole.vocabulary is not None)
    if count == 1 or not whole.returns.has_rows(batch.size) or changes:
        return (whole,)
    frame = replace(frame, like=frame.like or whole)
    alike = whole.guards.given if whole.guards else None
    try:
        chunks = [compile_forward(model, part, computes, frame, alike) for part in batch.distinct(count)]
    except CaptureError:
        if whole.guards is None:
            raise
        return (whole,)  # a chunk asks other questions
    rows = (batch.rows(0, count), batch.rows(count - 1, count))
    if not all(_fits(chunk, whole, size) for chunk, size in zip(chunks, rows, strict=False)):
        return (whole,)
    chunks = [replace(chunk, guards=whole.guards) for chunk in chunks]
    return (*chunks[:1] * (count - 1), chunks[-1])


def _fits(chunk: Program, whole: Program, rows: int) -> bool:
    """Whether evaluating in chunks gives the same outputs row by row, without data-dependent questions."""
    asks = whole.guards is None and chunk.guards is not None
    return not asks and chunk.returns.has_rows(rows) and chunk.returns.joins(whole.returns)


def require_words(batch: Batch, program: Program) -> None:
    """Require that every label of log-probabilities is a word, or ignored."""
    if program.returns.computes == "eval":
        return
    labels = batch.whole.example[2].long()  # a small type has no number for ignored labels
    words = program.returns.constants[-1]
    wrong = labels[((labels < 0) | (labels >= words)) & (labels != IGNORED)]
    if wrong.numel():
        raise PipelineError(
            f"labels= holds {wrong[0].item()}, and the output layer has {words} words; expected 0 to {words - 1}, or "
            f"{IGNORED} where there is no label."
        )


def microbatches_like(program: Program, batch: Batch) -> int:
    """The number of microbatches like those of `program` into which the batch divides."""
    counts = [n for n in range(1, batch.size + 1) if batch.divides_into(n)] or [1]
    count = next((n for n in counts if call_of(batch.microbatch(0, n)) == program.call), None)
    if count is None:
        raise PipelineError(
            f"the forward was compiled for microbatches of {listed(program.call)}; received "
            f"{listed(call_of(batch.whole))}, which does not divide into these. Pad it, or compile and save another."
        )
    output = program.returns
    fixed = output.computes == "eval" and any(value is not None for value in output.constants)
    if count > 1 and (fixed or not output.has_rows(batch.size // count)):
        what = "holds numbers that may depend on the rows" if fixed else "has not one row per sample"
        raise PipelineError(
            f"the model's output {what}, and is computed of one microbatch as it was compiled. Pass batches of "
            f"{batch.size // count}, or leave out the argument that makes forward return more than rows."
        )
    return count


def _warn(stages: Sequence[Stage]) -> None:
    if any(stage.random for stage in stages):
        warnings.warn(
            "the model draws random numbers in eval mode; every rank draws them from its own generator, microbatch by "
            "microbatch, and they are not those of the unsplit model.",
            stacklevel=2,
        )


def _sharding(canonical: Canonical, frame: Frame, manager: PassManager) -> VocabularySharding | None:
    """The output layer as shards, if what is computed needs it only through its exits: the rows that are shards
    already, which are gathered for other results (all logits), or if this places the parameters those of `vocab=`."""
    like, vocab = frame.like, frame.choices.vocab
    if (like is None and vocab not in (1, 2)) or (like is not None and like.vocabulary is None):
        return None
    try:
        if like is None and frame.choices.exact:
            raise NotShardable("exact=True sums over the vocabulary in eager's order")
        found = shard_head(canonical, manager, like.vocabulary.parameters if like and like.vocabulary else None)
        if found.head.weight in frame.sharded:
            raise NotShardable(f"{found.head.weight} is one rank's part already")
        return found
    except NotShardable as reason:
        if like is None:
            warnings.warn(
                f"vocab={vocab} is not used: {reason}. The first evaluation of a model in which nothing trains places "
                "its parameters, and this one the output layer whole on the last stage. Let log_probs be the first.",
                stacklevel=2,
            )
        return None


def forward_order(program: Program, count: int) -> Schedule:
    """The order in which that many microbatches flow through a forward alone."""
    return _in_order(program.schedule.placement, program.stages, program.vocabulary, count)


def _in_order(
    placement: Placement, stages: Sequence[StageProgram], vocabulary: VocabularyProgram | None, count: int
) -> Schedule:
    lookups = vocabulary is not None and bool(vocabulary.lookup)
    schedule = forward_only(placement, count, shards=vocabulary is not None, lookups=lookups)
    return lower(schedule)
