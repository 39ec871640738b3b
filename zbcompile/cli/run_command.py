"""The run command: train a compiled program with only a data function."""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zbcompile.cli.command_line import Command, add_flags, flag_of
from zbcompile.cli.compile_arguments import FLAGS, add_division, require_division
from zbcompile.cli.train_job import train
from zbcompile.cli.train_optimizer import DECAYS, NAMED
from zbcompile.cli.train_pipeline import Job
from zbcompile.errors import PipelineError
from zbcompile.options import BACKENDS
from zbcompile.progress import Say

EPILOG = """the data:
  --data FILE.py:batches (or package.module:batches) names a function, which every rank calls once, or an iterable.
  It gives one batch per step, the same on every rank of a replica, either as
      (args, kwargs)      a tuple and a mapping, what pipe.step takes, or
      {"input_ids": ...}  a mapping of keywords.
  The target of the loss that the program was compiled with is the keyword "target". The function gets those of these
  keywords for which it has parameters:
      start               the number of batches that were trained on before; the first one that it gives is batch
                          number `start`
      seed                --seed, or what the program was compiled with
      replica, replicas   which replica of the pipeline this is, of how many: each trains on its own batches
  When a run is resumed, a function without `start` gives all batches again, and those trained on before are skipped.
  If the iterable has state_dict and load_state_dict (a stateful loader), every checkpoint holds its state.
  The generators of Python, torch and numpy are seeded before the function is called, and are part of a checkpoint.

examples:
  python -m zbcompile.run program --data examples/text_batches.py:batches --weights model.safetensors --steps 100
  torchrun --standalone --nproc-per-node 4 -m zbcompile.run program --data examples/text_batches.py:batches \\
      --weights model.safetensors --steps 1000 --lr 3e-4 --checkpoint checkpoints --every 100 --resume
  torchrun --nnodes 1:2 --nproc-per-node 4 --max-restarts 10 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
      -m zbcompile.run examples/targets.py:gpt --schedule zb-h1 --microbatches 16 --exact --data ... --steps 1000 \\
      --checkpoint checkpoints --resume
The second one resumes after a crash or a kill, with the same bits as if it had never stopped: start it again, or let
torchrun do it (--max-restarts). A program is compiled for one number of ranks. The third one starts from a TARGET:
after a restart on fewer or more ranks it is compiled for these, and goes on from the last checkpoint.
docs/running.md describes checkpoints and how to load them elsewhere.
"""


def _run(chosen: argparse.Namespace, say: Say) -> None:
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
    require_division(job.zero, job.reshard)
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


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR|TARGET",
        type=Path,
        help="a program, as pipe.program.save writes it; or FILE.py:function, which returns the model and one "
        "microbatch (as for zbcompile.compile) and is compiled for the ranks that are there",
    )
    parser.add_argument("--data", required=True, metavar="FILE.py:NAME", help="the source of the batches (see below)")
    parser.add_argument("--steps", required=True, type=int, help="optimizer steps in total, resumed ones included")
    parser.add_argument("--seed", type=int, help="of dropout, --init and the data (default: the program's)")
    _add_optimizer(parser.add_argument_group("the optimizer"))
    _add_state(parser.add_argument_group("weights and checkpoints"))
    _add_process(parser.add_argument_group("processes and output"))
    add_flags(parser.add_argument_group("how to compile a TARGET"), FLAGS)


def _add_optimizer(group: Any) -> None:
    add = group.add_argument
    add(
        "--optimizer",
        default="adamw",
        metavar="|".join((*NAMED, "FILE.py:NAME")),
        help="torch's, or a function that gets a list of (name, parameter) and the options (default: adamw)",
    )
    add("--lr", type=float, metavar="RATE", help="the highest learning rate (default: the optimizer's)")
    add("--weight-decay", type=float, metavar="DECAY", help="default: the optimizer's")
    add(
        "--option",
        action="append",
        default=[],
        type=_option,
        metavar="NAME=VALUE",
        help='any other option of the optimizer, such as "betas=(0.9, 0.95)"; may be repeated',
    )
    add("--warmup", type=int, default=0, metavar="STEPS", help="warm up the rate over this many steps")
    add("--decay", choices=DECAYS, default="none", help="lower the rate to 0 at the last step")
    add("--clip", type=float, metavar="NORM", help="clip the gradients to this norm over all ranks")
    add_division(add)
    add("--early", action="store_true", help="update stage by stage inside of the step")
    add("--validate", choices=("before", "after"), default="before", help="after: early, in spite of --clip")


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(f"{text!r}; expected NAME=VALUE with a Python literal") from None


def _add_state(group: Any) -> None:
    add = group.add_argument
    add("--weights", type=Path, metavar="PATH", help=".safetensors, a directory of them with an index, or a checkpoint")
    add(
        "--init",
        metavar="FILE.py:NAME",
        help="a function init(name, tensor) that fills a tensor in place; --weights are loaded after it",
    )
    add("--checkpoint", type=Path, metavar="DIR", help="folder of checkpoints, shared by all ranks")
    add("--every", type=int, default=100, metavar="N", help="steps between checkpoints (default: 100)")
    add("--keep", type=int, default=3, metavar="N", help="checkpoints to keep (default: 3)")
    add("--save-async", action="store_true", help="keep training while a checkpoint is written (takes memory)")
    add("--resume", action="store_true", help="continue from the newest whole checkpoint, if any")
    add("--export", type=Path, metavar="PATH", help="write the final weights: .safetensors or a directory")


def _add_process(group: Any) -> None:
    add = group.add_argument
    add("--replicas", type=int, default=1, metavar="N", help="replicas of the pipeline (data parallel)")
    add(
        "--tensor",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share every matrix: TARGET takes `mesh` and parallelises its model",
    )
    add("--threads", type=int, metavar="N", help="torch's threads per process (default: torch's own choice)")
    add(
        "--operator",
        action="append",
        default=[],
        dest="operators",
        metavar="LIBRARY::NAME",
        help="an operator of another library that the program may call; --data must import it",
    )
    add(
        "--backend",
        metavar="|".join((*BACKENDS, "FILE.py:NAME")),
        help="what runs the graphs (docs/backends.md; default: as the program was saved)",
    )
    add("--log-every", type=int, default=10, metavar="N", help="steps between log lines (default: 10)")
    add_flags(group, ("timeout", "debug_nan"))


DESCRIPTION = (
    "Train a compiled program with a data function; the model's source is not needed. Under torchrun each process is "
    "one rank; without it all ranks run in this process."
)
main = Command("run", DESCRIPTION, EPILOG, _add_arguments, _run)
