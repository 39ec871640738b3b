"""Compile an example to look at it: no rank, no process group and no step is needed."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zbcompile.batches.batch import Microbatch, whole_batch
from zbcompile.batches.example import Example
from zbcompile.compiler.compile_model import LaidOut, compile_laid_out, lay_out_step
from zbcompile.compiler.inference import Frame, compile_forward
from zbcompile.model.model_info import module_of
from zbcompile.passes.compile_options import Choices
from zbcompile.passes.exported.capture.training_step import loss_in
from zbcompile.passes.pass_list.run_passes import Observer
from zbcompile.program.directories import read_manifest, read_program
from zbcompile.program.program import Program
from zbcompile.schedules.ir.schedule import Schedule

_NOT_THE_MODELS = (DeprecationWarning, FutureWarning, PendingDeprecationWarning)


@dataclass(frozen=True)
class CompiledExample:
    """A compiled example. `dropped` names outputs that training does not keep, `warnings` what capturing warned of.

    `laid_out` is the captured step; a program that was read has none.
    """

    example: Example
    program: Program
    dropped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    laid_out: LaidOut | None = None


Compile = Callable[[Schedule, Choices], Program]


def compile_example(
    example: Example,
    schedule: Schedule,
    choices: Choices,
    observe: Observer | None = None,
    choose: Callable[[Compile], Program] | None = None,
) -> CompiledExample:
    """Compile the training step of `example` for `schedule`; raises CompileError if the model cannot be compiled.

    `observe` sees what each pass makes of the model, and of each distinct stage. `choose` may compile the captured step
    for several schedules or choices, and returns the program to take.
    """
    dropped: list[str] = []

    def loss_of_model(output: Any, target: Any) -> torch.Tensor:
        dropped.extend(name for name in names_of_output(output) if name != "loss")
        return loss_in(output)

    microbatch, loss = one_microbatch(example), example.loss or loss_of_model
    with _warnings() as seen:
        laid_out = lay_out_step(example.model, microbatch, loss, choices, schedule, observe)

        def compile_(schedule: Schedule, choices: Choices) -> Program:
            return compile_laid_out(example.model, microbatch, laid_out, schedule, choices, observe=observe)

        program = compile_(schedule, choices) if choose is None else choose(compile_)
    return CompiledExample(example, program, tuple(dict.fromkeys(dropped)), tuple(seen), laid_out)


def compile_example_forward(example: Example, computes: str, frame: Frame) -> Program:
    """A forward of `FORWARDS` for the inputs of `example`: log-probabilities of its target, or of its keyword `labels`,
    which forward then does not get. Raises CompileError, also for an example without them."""
    kwargs, labels = dict(example.kwargs), None
    if computes != "eval":
        labels = example.target if example.target is not None else kwargs.pop("labels", None)
    with _warnings():
        microbatch = whole_batch(example.args, kwargs, labels).whole
        return compile_forward(example.model, microbatch, computes, frame)


def read_saved(folder: Path) -> CompiledExample:
    """The program in a directory, all ranks of it, on whatever machine. Its example has the model's names and shapes
    but no inputs. The operators of other libraries must be defined, but they only run in a step."""
    data = read_manifest(folder)
    program = read_program(folder, data, range(data["ranks"]), torch.device("cpu"), data["operators"])
    return CompiledExample(Example(module_of(program.model)), program)


def one_microbatch(example: Example) -> Microbatch:
    """The inputs of an example as the compiler takes them."""
    return whole_batch(example.args, dict(example.kwargs), example.target).whole


def names_of_output(output: Any) -> list[str]:
    """The names under which a model's output can be asked for its parts; none for a tensor."""
    if isinstance(output, torch.Tensor):
        return []
    if isinstance(output, Mapping):
        return [str(name) for name, value in output.items() if value is not None]
    if dataclasses.is_dataclass(output):
        return [field.name for field in dataclasses.fields(output) if getattr(output, field.name) is not None]
    return [name for name, value in vars(output).items() if value is not None] if hasattr(output, "__dict__") else []


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings raised inside, once each, without those for torch's own developers."""
    seen: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield seen
    texts = [str(w.message).strip() for w in caught if not issubclass(w.category, _NOT_THE_MODELS)]
    seen.extend(dict.fromkeys(text.splitlines()[0] for text in texts if text))
