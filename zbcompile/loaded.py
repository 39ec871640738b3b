"""The pipeline of a program that was read from a directory: it has no model to compile, only names and memory."""

from typing import Any

from zbcompile.batch import Batch, flatten_batch, refuse_input_gradients, require_divisible
from zbcompile.engine import Engine, Executable
from zbcompile.errors import PipelineError
from zbcompile.model_facts import module_of
from zbcompile.options import Options
from zbcompile.pipe import Pipeline
from zbcompile.program import Program, call_of
from zbcompile.program_manifest import SavedProgram


class LoadedPipeline(Pipeline):
    """A pipeline made by `zbcompile.load`. It steps for the shapes that it was compiled for, and cannot evaluate: the
    program holds the training step alone."""

    def __init__(self, program: SavedProgram, options: Options, engine: Engine) -> None:
        super().__init__(module_of(program.model), options, engine)

    def adopt(self, program: Program) -> Executable:
        self._executable = super().adopt(program)
        return self._executable

    def compile(self, *args: Any, target: Any = None, **kwargs: Any) -> "LoadedPipeline":
        """Check that this batch is one that the program was compiled for."""
        self._program_for(self._split(args, kwargs, target))
        return self

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Batch:
        batch = flatten_batch(args, kwargs, target, self.options.split)
        refuse_input_gradients(batch)
        require_divisible(batch, self.program.schedule.microbatches)
        return batch

    def _program_for(self, batch: Batch) -> Executable:
        given = call_of(batch.microbatch(0, self.program.schedule.microbatches))
        if given != self.program.call:
            raise PipelineError(
                f"the program was compiled for microbatches of {_listed(self.program.call)}; received "
                f"{_listed(given)}. Pass such batches, or compile and save a program for these."
            )
        return self._executable

    def _program_for_eval(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        raise PipelineError(
            "a loaded program cannot evaluate: it holds the training step, not the model. Load pipe.state_dict("
            "full=True) into the model, or make a pipeline of it."
        )


def _listed(call: tuple[str, ...]) -> str:
    structure, *leaves = call
    return f"{', '.join(leaves)} (in {structure})"
