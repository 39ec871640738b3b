"""Programs for several answers in one directory: what a pipeline has compiled for them, saved and picked from again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.frontend.answers import ByAnswers, ByShape
from zbcompile.passes.capture.guards import Guards
from zbcompile.program.program import ANSWERS, Program
from zbcompile.program.save import save_program
from zbcompile.runtime.engine import Executable


def save_with_answers(kept: ByShape[Any, Executable], ranks: Ranks, program: Program, directory: Path) -> None:
    """Write a program; beside the first one, those of its shape for the other answers that were met."""
    found = kept.first_shape() if len(kept) else None
    if found is not None and found.first().program is program:
        others = [replace(each.program, guards=guards) for guards, each in found.others()]
        beside = {f"{ANSWERS}{number}": each for number, each in enumerate(others, 1)}
        program = replace(program, also={**program.also, **beside})
    save_program(program, directory, ranks)


def require_held(found: ByAnswers[Executable], microbatches: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Raise PipelineError unless there is an executable for the answers of every microbatch."""
    for index, key in enumerate(found.matching(microbatches)):
        if key is None:
            refuse_answers(found.guards[0], index, microbatches[index])


def refuse_answers(guards: Guards, index: int, microbatch: Mapping[str, torch.Tensor]) -> NoReturn:
    """Raise PipelineError for a microbatch whose answers a loaded program does not hold."""
    raise PipelineError(
        f"microbatch {index} gives another answer than the program was compiled for: {guards.different(microbatch)}. "
        "Pass batches that answer alike, or step with such a batch before saving the program."
    )
