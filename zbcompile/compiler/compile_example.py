"""Compile an example to look at it: no rank, no process group and no step is needed."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from zbcompile.batches.batch import Microbatch, whole_batch
from zbcompile.batches.example import Example
from zbcompile.compiler.compile_forward import ForwardOptions, compile_forward
from zbcompile.compiler.compile_model import compile_program, export_step
from zbcompile.model.model_info import module_of
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.passes.compile_step import Observer, no_observer
from zbcompile.program.directory import read_manifest, read_program
from zbcompile.program.program import Program
from zbcompile.schedules.ir.schedule import Schedule

_NOT_THE_MODELS = (DeprecationWarning, FutureWarning, PendingDeprecationWarning)


@dataclass(frozen=True)
class CompiledExample:
    """A compiled example. `dropped` names outputs that training does not keep, `warnings` what
    capturing warned of."""

    example: Example
    program: Program
    dropped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


Compile = Callable[[Schedule, CompileOptions], Program]


def compile_example(
    example: Example,
    schedule: Schedule,
    choices: CompileOptions,
    observe: Observer = no_observer,
    choose: Callable[[Compile], Program] | None = None,
) -> CompiledExample:
    """Compile the training step of `example` for `schedule`; raises CompileError if the model
    cannot be compiled.

    `observe` is called after each pass. `choose` may compile the exported step for several
    schedules or choices, and returns the program to take.
    """
    microbatch, loss, dropped = one_microbatch(example), example.loss, tuple[str, ...]()
    with recorded_warnings() as seen:
        device = next((t.device for t in microbatch.tensors.values()), None)
        exported = export_step(
            example.model,
            microbatch,
            loss,
            device=device,
            choices=choices,
            schedule=schedule,
            observe=observe,
        )
        dropped = exported.step.unused_outputs

        def compile_(schedule: Schedule, choices: CompileOptions) -> Program:
            return compile_program(
                example.model, microbatch, exported, schedule, choices, observe=observe
            )

        program = compile_(schedule, choices) if choose is None else choose(compile_)
    return CompiledExample(example, program, dropped, tuple(seen))


def compile_example_forward(
    example: Example, computes: str, schedule: Schedule, choices: CompileOptions
) -> Program:
    """Returns the program of a forward for the inputs of `example`.

    Log-probabilities are those of its target, or of its keyword `labels`, which forward then does
    not get. Raises CompileError, also for an example without labels.
    """
    kwargs, labels = dict(example.kwargs), None
    if computes != "eval":
        labels = example.target if example.target is not None else kwargs.pop("labels", None)
    with recorded_warnings():
        microbatch = whole_batch(example.args, kwargs, labels).whole
        return compile_forward(
            example.model, microbatch, computes, ForwardOptions(schedule, None, choices, {})
        )


class _AnyName(frozenset[str]):
    """Contains every name: a program that is inspected runs its operators on fake tensors only."""

    def __contains__(self, name: object) -> bool:
        return True


def read_saved(folder: Path) -> CompiledExample:
    """The program in a directory, all ranks of it, on whatever machine. Its example has the model's
    names and shapes but no inputs. The operators of other libraries must be defined, but they only
    run in a step."""
    data = read_manifest(folder)
    program = read_program(folder, data, range(data["ranks"]), torch.device("cpu"), _AnyName())
    return CompiledExample(Example(module_of(program.model)), program)


def one_microbatch(example: Example) -> Microbatch:
    """The inputs of an example as the compiler takes them."""
    return whole_batch(example.args, dict(example.kwargs), example.target).whole


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Context that collects the warnings raised inside, once each, without those for torch's own
    developers."""
    seen: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield seen
    texts = [str(w.message).strip() for w in caught if not issubclass(w.category, _NOT_THE_MODELS)]
    seen.extend(dict.fromkeys(text.splitlines()[0] for text in texts if text))
