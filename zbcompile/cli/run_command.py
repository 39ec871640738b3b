"""The run command: train a compiled program with only a data function."""

import argparse
from collections.abc import Iterator
from typing import Any

from zbcompile.cli.option_flags import FLAGS, flag_of
from zbcompile.cli.train_job import train
from zbcompile.cli.train_pipeline import Job
from zbcompile.errors import PipelineError
from zbcompile.progress import Say


def run(chosen: argparse.Namespace, say: Say) -> None:
    job = _job(vars(chosen))
    say(f"opening {job.directory}")
    train(job, say)


def _job(chosen: dict[str, Any]) -> Job:
    options = dict(chosen["option"])
    options |= {name: chosen[name] for name in ("lr", "weight_decay") if chosen[name] is not None}
    compiling = {name: chosen[name] for name in FLAGS if name in chosen}
    apart = {"debug", "option", "lr", "weight_decay", *compiling}
    given = {name: value for name, value in chosen.items() if name not in apart}
    job = Job(**given, options=options, compiling=compiling)
    for problem in _problems(job):
        raise PipelineError(problem)
    return job


def _problems(job: Job) -> Iterator[str]:
    """The arguments that contradict each other, and numbers out of range."""
    if job.is_target and "microbatches" not in job.compiling:
        yield "a TARGET needs --microbatches N, so that it trains alike on any number of ranks"
    if job.compiling and not job.is_target:
        yield f"{flag_of(next(iter(job.compiling)))} is for a TARGET; {job.directory} is compiled"
    for name in ("steps", "every", "keep", "replicas", "tensor", "log_every"):
        if getattr(job, name) < 1:
            yield f"{flag_of(name)} is {getattr(job, name)}; expected at least 1"
    if job.zero and job.replicas == 1:
        yield f"--zero {job.zero} divides the optimizer among replicas; pass --replicas N as well"
    if job.resume and job.checkpoint is None:
        yield "--resume needs --checkpoint DIR, where the checkpoints are"
    if job.export is not None and job.export.suffix not in ("", ".safetensors"):
        yield f"--export {job.export}; expected FILE.safetensors or a directory"
