"""Evaluating with a loaded program: the forwards that its directory holds, for the microbatches of their shapes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zbcompile.errors import PipelineError
from zbcompile.frontend.evaluation import Asked, Forwards, Parts, require_words
from zbcompile.frontend.saved_answers import refuse_answers
from zbcompile.model.batch import Batch
from zbcompile.program.program import Program, call_of


class SavedForwards(Forwards):
    """As `Forwards`, of the `programs` of a directory by what they compute."""

    def __init__(self, *pipeline: Any, programs: Mapping[str, Program]) -> None:
        super().__init__(*pipeline)
        self._programs = programs
        self._executable = {name: self.executables.prepare(program) for name, program in programs.items()}

    def _found(self, batch: Batch, asked: Asked) -> Parts:
        computes = asked.wanted.computes
        if asked.wanted.training:
            raise PipelineError('a program holds forwards in eval mode; for mode="train" make a pipeline of the model.')
        if computes not in self._programs:
            raise PipelineError(
                f"the directory holds {', '.join(self._programs) or 'the training step alone'}, and cannot compute "
                f"{computes}. Compile it with --also {computes}, or make a pipeline of the model."
            )
        program = self._programs[computes]
        count = _count_of(batch, program)
        require_words(batch, program)
        require_answers(program, batch.into(count).tensors)
        return (self._executable[computes],) * count


def _count_of(batch: Batch, program: Program) -> int:
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


def require_answers(program: Program, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Require that every microbatch answers what forward asks as the program was compiled for."""
    for index, tensors in enumerate(microbatches if program.guards else ()):
        if program.guards and program.guards.different(tensors):
            refuse_answers(program.guards, index, tensors)


def listed(call: tuple[str, ...]) -> str:
    """The form of a microbatch, for messages."""
    structure, *leaves = call
    return f"{', '.join(leaves)} (in {' '.join(structure.split())})"
