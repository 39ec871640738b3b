"""The forward of a batch: the programs of its microbatches, or how a program that is there divides it."""

from dataclasses import replace

from torch import nn

from zbcompile.batches.batch import Batch
from zbcompile.compiler.inference import Computation, Frame, compile_forward
from zbcompile.errors import PipelineError
from zbcompile.passes.capture.questions import ForeignAnswers
from zbcompile.passes.errors import CaptureError
from zbcompile.passes.vocabulary.log_probs import IGNORED
from zbcompile.program.program import Program, call_of, listed


def compile_forwards(
    model: nn.Module, batch: Batch, count: int, wanted: Computation, frame: Frame, given: ForeignAnswers | None = None
) -> tuple[Program, ...]:
    """The programs of the microbatches of this batch, with the batch's own answers to what forward asks, or those
    `given`; each is right for batches that answer as the `guards` of the first one say.

    There are `count`, the last of which may be smaller, if every output has one row per sample; an output of another
    kind (a loss, say) is computed on the whole batch, so that it is what the model itself returns. So is a forward that
    changes buffers in eval mode, which a batch changes once. What forward asks is answered for the batch as a whole, as
    in eager mode.
    """
    whole = compile_forward(model, batch.whole, wanted, frame, given)
    changes = not wanted.training and any(stage.changed for stage in whole.stages)
    count = batch.most_parts(count, even=whole.vocabulary is not None)
    if count == 1 or not whole.returns.has_rows(batch.size) or changes:
        return (whole,)
    frame = replace(frame, like=frame.like or whole)
    alike = whole.guards.given if whole.guards else None
    try:
        chunks = [compile_forward(model, part, wanted, frame, alike) for part in batch.distinct(count)]
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
    return not asks and chunk.returns.has_rows(rows) and chunk.returns.rest == whole.returns.rest


def require_words(batch: Batch, program: Program) -> None:
    """Require that every label of log-probabilities is a word, or ignored."""
    if program.returns.computes == "eval":
        return
    labels = batch.whole.example[2].long()  # a small type has no number for ignored labels
    words = program.returns.constants[program.returns.names[-1]]
    wrong = labels[((labels < 0) | (labels >= words)) & (labels != IGNORED)]
    if wrong.numel():
        raise PipelineError(
            f"labels= holds {wrong[0].item()}, and the output layer has {words} words; expected 0 to {words - 1}, or "
            f"{IGNORED} where there is no label."
        )


def microbatches_like(program: Program, batch: Batch) -> int:
    """Into how many microbatches like those of `program` the batch divides."""
    counts = [n for n in range(1, batch.size + 1) if batch.divides_into(n)] or [1]
    count = next((n for n in counts if call_of(batch.microbatch(0, n)) == program.call), None)
    if count is None:
        raise PipelineError(
            f"the forward was compiled for microbatches of {listed(program.call)}; received "
            f"{listed(call_of(batch.whole))}, which does not divide into these. Pad it, or compile and save another."
        )
    output = program.returns
    fixed = output.computes == "eval" and any(value is not None for value in output.constants.values())
    if count > 1 and (fixed or not output.has_rows(batch.size // count)):
        what = "holds numbers that may depend on the rows" if fixed else "has not one row per sample"
        raise PipelineError(
            f"the model's output {what}, and is computed of one microbatch as it was compiled. Pass batches of "
            f"{batch.size // count}, or leave out the argument that makes forward return more than rows."
        )
    return count
