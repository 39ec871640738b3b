"""Compiling the forward alone: a program without backward graphs, whose parameters stay where they
train."""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from zbcompile.batches.batch import Batch, Microbatch, listed
from zbcompile.compiler.compile_model import (
    choose_cuts,
    groups_of,
    operators_of,
    output_of,
    overweight_of,
    parameter_homes,
    placement_ranks,
    require_homes,
)
from zbcompile.compiler.torch_logs import without_torchs_logs
from zbcompile.errors import CompileError, PipelineError
from zbcompile.model.model_info import facts_of
from zbcompile.passes.capture.export import ExportOptions, export_forward
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.compile_step import compile_graph
from zbcompile.passes.graph.fx import is_random
from zbcompile.passes.stage.stage_programs import stage_programs
from zbcompile.passes.step_graph import StepGraph
from zbcompile.passes.vocabulary.log_probs import IGNORED, require_whole_logits
from zbcompile.passes.vocabulary.output_layer import NotShardableError
from zbcompile.passes.vocabulary.shard import shard_passes
from zbcompile.passes.vocabulary.shard_program import VocabularyProgram, even_bounds
from zbcompile.passes.vocabulary.trunk import ShardedStep, cut_output_layer
from zbcompile.program.directory import save_here
from zbcompile.program.output import FORWARDS
from zbcompile.program.program import Program
from zbcompile.schedules import Placement, Schedule, lower
from zbcompile.schedules.generators.forward_only import forward_only


@dataclass(frozen=True)
class ForwardOptions:
    """The schedule and the placement that a forward is compiled for.

    Attributes:
        schedule: Gives stages and ranks.
        like: A program of the same model that has placed the parameters; None if this one does.
        process_groups: The mesh dimension of each process group, by the group's name.
        sharded: Parameters that this rank holds a part of.
        device: The device of parameters that are on the meta device.
    """

    schedule: Schedule
    like: Program | None
    choices: CompileOptions
    process_groups: Mapping[str, str]
    sharded: Collection[str] = ()
    device: torch.device | None = None


def compile_placement(model: nn.Module, microbatch: Microbatch, options: ForwardOptions) -> Program:
    """Returns a program that places the parameters of a model before its first training step, with
    the rows of its output layer on all ranks. It is not run.

    Raises:
        CompileError: The output has no logits, or their layer cannot be sharded.
    """
    try:
        return compile_forward(model, microbatch, "placement", options)
    except CompileError as error:
        raise CompileError(
            f"{error} An evaluation before the first step places the rows of the output layer by "
            "the logits that the model returns. Call pipe.compile(batch, target=...) before it."
        ) from error


@without_torchs_logs()
def compile_forward(
    model: nn.Module, microbatch: Microbatch, computes: str, options: ForwardOptions
) -> Program:
    """Returns the program of the forward for microbatches like this one.

    `computes` is a key of `FORWARDS`.
    """
    args, kwargs, target = microbatch.example
    exported = ExportOptions(
        static_inputs=microbatch.static,
        process_groups=options.process_groups,
        device=options.device,
    )
    step = export_forward(model, args, kwargs, target, FORWARDS[computes], exported)
    if computes == "log_probs":
        require_whole_logits(step, options.sharded)
    _warn_of_random_numbers(step)
    like, choices = options.like, options.choices
    sharded = _cut_output_layer(step, computes, options)
    trunk = step if sharded is None else sharded.trunk
    ranks_of = placement_ranks(options.schedule.placement)
    compiled = compile_graph(
        trunk,
        ranks_of=ranks_of,
        recompute="off",
        choose_cuts=lambda step, line: choose_cuts(step, line, choices, ranks_of, like),
    )
    programs = stage_programs(compiled, choices)
    if like is not None:
        require_homes(programs, like)
    vocabulary = None
    if sharded is not None:
        placed = like.vocabulary.bounds if like is not None and like.vocabulary else None
        bounds = placed or even_bounds(sharded.loss.words, options.schedule.ranks)
        vocabulary = shard_passes(sharded, bounds, barriers=0)
    return Program(
        model=facts_of(model, step.constant_values),
        cuts=compiled.cuts,
        overweight=overweight_of(compiled),
        stages=programs,
        lowered=_lowered(options.schedule.placement, vocabulary, 1),
        homes=parameter_homes(model, programs, vocabulary) if like is None else like.homes,
        choices=choices,
        loss_dtype="float32",
        inputs={path: (tuple(t.shape), str(t.dtype)) for path, t in microbatch.tensors.items()},
        vocabulary=vocabulary,
        line_operators=operators_of(compiled.line),
        call=microbatch.signature,
        groups=groups_of(step, programs),
        changed_state=frozenset(step.changed_state),
        output=output_of(computes, step, programs),
        writer=save_here,
    )


def compile_forwards(
    model: nn.Module, batch: Batch, count: int, computes: str, options: ForwardOptions
) -> tuple[Program, ...]:
    """Returns the programs of the microbatches of a batch.

    There are `count` programs if every output has one row per sample. The last one may be for fewer
    rows. An output of another kind, such as a loss, is computed on the whole batch, so
    that it is what the model itself returns. So is a forward that changes buffers in eval mode,
    which a batch changes once.
    """
    full = compile_forward(model, batch.whole, computes, options)
    changes = any(stage.changed for stage in full.stages)
    count = 1 if batch.whole.static else batch.most_parts(count, even=full.vocabulary is not None)
    if count == 1 or not full.returns.has_rows(batch.size) or changes:
        return (full,)
    options = replace(options, like=options.like or full)
    parts = [compile_forward(model, part, computes, options) for part in batch.distinct(count)]
    rows = (batch.rows(0, count), batch.rows(count - 1, count))
    for part, size in zip(parts, rows, strict=False):
        if not part.returns.has_rows(size) or not part.returns.joins(full.returns):
            return (full,)
    return (*parts[:1] * (count - 1), parts[-1])


def require_words(batch: Batch, program: Program) -> None:
    """Raises PipelineError for labels of log-probabilities that are no words."""
    if program.returns.computes == "eval":
        return
    labels = batch.whole.example[2].long()  # a small type has no number for ignored labels
    words = program.returns.constants[-1]
    wrong = labels[((labels < 0) | (labels >= words)) & (labels != IGNORED)]
    if wrong.numel():
        raise PipelineError(
            f"labels= holds {wrong[0].item()}, and the output layer has {words} words; expected 0 "
            f"to {words - 1}, or {IGNORED} where there is no label."
        )


def microbatches_like(program: Program, batch: Batch) -> int:
    """Returns the number of microbatches like those of a program that a batch divides into."""
    counts = [n for n in range(1, batch.size + 1) if batch.divides_into(n)] or [1]
    count = next((n for n in counts if batch.microbatch(0, n).signature == program.call), None)
    if count is None:
        raise PipelineError(
            f"the forward was compiled for microbatches of {listed(program.call)}; received"
            f" {listed(batch.whole.signature)}, which does not divide into these. Pad it, or"
            " compile and save another."
        )
    output = program.returns
    fixed = output.computes == "eval" and any(value is not None for value in output.constants)
    if count > 1 and (fixed or not output.has_rows(batch.size // count)):
        what = (
            "holds numbers that may depend on the rows" if fixed else "has not one row per sample"
        )
        raise PipelineError(
            f"the model's output {what}, and is computed of one microbatch as it was compiled. Pass"
            f" batches of {batch.size // count}, or leave out the argument that makes forward"
            " return more than rows."
        )
    return count


def forward_order(program: Program, count: int) -> Schedule:
    """Returns the order in which that many microbatches run through a forward alone."""
    return _lowered(program.schedule.placement, program.vocabulary, count)


def _lowered(placement: Placement, vocabulary: VocabularyProgram | None, count: int) -> Schedule:
    lookups = vocabulary is not None and vocabulary.lookup is not None
    return lower(forward_only(placement, count, shards=vocabulary is not None, lookups=lookups))


def _cut_output_layer(
    step: StepGraph, computes: str, options: ForwardOptions
) -> ShardedStep | None:
    """Returns the forward without its output layer, if that is sharded over all ranks.

    Another program that has placed the parameters decides; a forward that it did not shard, and one
    that needs whole logits, reads the layer whole. A forward that places them raises CompileError
    if `vocab=` asks for shards that are impossible.
    """
    like, vocab = options.like, options.choices.vocab
    rows = None
    if like is not None:
        if like.vocabulary is None:
            return None
        rows = like.vocabulary.parameters
    elif vocab not in (1, 2) or computes == "eval":
        return None
    try:
        sharded = cut_output_layer(step, rows)
        if sharded.weight in options.sharded:
            raise NotShardableError(f"{sharded.weight} is one rank's part already.")
        return sharded
    except NotShardableError as reason:
        if like is None:
            raise CompileError(f'vocab={vocab}: {reason} Use vocab="off".') from reason
        return None


def _warn_of_random_numbers(step: StepGraph) -> None:
    if any(map(is_random, step.calls())):
        warnings.warn(
            "the model draws random numbers in eval mode; every rank draws them from its own "
            "generator, microbatch by microbatch, and they are not those of the unsplit model.",
            stacklevel=2,
        )
