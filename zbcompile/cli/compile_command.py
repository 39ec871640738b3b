"""The compile command: compile ahead of time, for `zbcompile.load`."""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from zbcompile.backends.backend import compile_passes, make_backend
from zbcompile.cli.command_line import split_options
from zbcompile.cli.compile_arguments import Plan, compiled, example_of, quiet, schedule_of
from zbcompile.compiler.compile_example import compile_example_forward
from zbcompile.distributed.process_group import device_of, is_alone
from zbcompile.errors import PipelineError
from zbcompile.persistence.safetensors_weights import save_weights
from zbcompile.program.directory import program_files, save_here
from zbcompile.progress import Say


@dataclass(frozen=True)
class CompileRequest(Plan):
    """The arguments of the command line."""

    output: Path
    weights: Path | None
    only: str | None


def run(chosen: argparse.Namespace, say: Say) -> None:
    """Compile and save; raises the project's errors and OSError."""
    request = CompileRequest(**split_options(chosen))
    if not is_alone():
        raise PipelineError(
            "one process compiles for all ranks. Start zbcompile.compile without torchrun."
        )
    program_files(request.output)  # a wrong place is refused before a long compilation
    options = request.options
    if request.weights is not None and request.fake:
        raise PipelineError(
            "--weights writes the model's own values, which it lacks under --fake. Leave one out."
        )
    schedule = schedule_of(request)
    example = example_of(request)
    backend = make_backend(options.backend, device_of(example.model))
    say(
        f"{type(example.model).__name__} is built; capturing it for {schedule.name},"
        f" {schedule.ranks} ranks"
    )
    if request.only is None:
        program = compiled(example, schedule, request, say).program
    else:
        with quiet(request):
            program = compile_example_forward(example, request.only, schedule, options.choices)
        say(f"compiled {request.only}")
    program = replace(program, step=options.step, writer=save_here)
    if request.only and options.vocab not in (None, "off") and program.vocabulary is None:
        raise PipelineError(
            f"--vocab {options.vocab} shards an output layer whose logits nobody needs whole, for "
            f"log_probs; --only {request.only} has none. Leave --vocab out."
        )
    program.save(request.output)
    if request.weights is not None:
        save_weights(request.weights, example.model)
    say("saved")
    if backend.compiler is not None:
        say(f"compiling the graphs with {backend.name}")
        print(compile_passes(program, range(schedule.ranks), backend)[1], file=sys.stderr)
    print(request.output)
