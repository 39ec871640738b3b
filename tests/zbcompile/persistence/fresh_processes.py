"""Programs compiled here and run by fresh processes, at two and four ranks, that cannot import the
models' source: two, then four, forked from one that has imported torch and zbcompile."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tests.support.ports import free_port
from tests.support.training import Case, Trained, join, problem_of, reference
from zbcompile.batches.example import Example
from zbcompile.compiler.compile_example import one_microbatch
from zbcompile.compiler.compile_model import compile_program, export_step
from zbcompile.passes.compile_options import CompileOptions
from zbcompile.program.program import StepOptions
from zbcompile.schedules import build

ROOT = Path(__file__).parents[3]
MODELS = ("gpt-tied", "llama", "vit", "unet")
PLANS = {2: "zb-v", 4: "zb-h1"}  # ranks: schedule; both have four stages, so the same graphs
MICROBATCHES = 4
SCRIPT = """
import gc, multiprocessing, os, sys
sys.modules.update(dict.fromkeys(("transformers", "gpt", "tests", "examples")))  # now nobody can import these
import torch, torch._dynamo, zbcompile

torch.set_num_threads(1)
zbcompile.load  # imports the runtime

def run(model, ranks):
    given = torch.load(f"{model}.pt")
    pipe = zbcompile.load(f"{model} at {ranks}", given["state"], timeout=1800)
    loss = pipe.step(*given["args"], **given["kwargs"])
    found = {"loss": loss, "gradients": {name: p.grad for name, p in pipe.named_parameters()}}
    pipe.close()
    return found

def live(rank, ranks, models):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": os.environ[f"PORT_{ranks}"]}
    found = {model: run(model, ranks) for model in models}
    torch.distributed.barrier()  # the store of the process group lives as long as its first rank
    torch.distributed.destroy_process_group()
    torch.save(found, f"found-{rank}-of-{ranks}.pt")

gc.freeze()
context = multiprocessing.get_context("fork")
for count in (2, 4):
    ranks = [context.Process(target=live, args=(rank, count, sys.argv[1:])) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
"""


def run_alone(
    folder: Path, models: Sequence[str], backend: str = "fx"
) -> dict[tuple[str, int], Trained]:
    """One step of every model at two and at four ranks, joined over the ranks, by model and
    ranks."""
    for model in models:
        _save(model, folder, backend)
    (folder / "zbcompile").symlink_to(ROOT / "zbcompile")  # all that they can import
    place = {"MASTER_ADDR": "localhost"} | {f"PORT_{ranks}": str(free_port()) for ranks in PLANS}
    environment = {**os.environ, **place, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, *models]
    options = {"cwd": folder, "env": environment, "timeout": 300 if backend == "fx" else 3600}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, **options)
    assert done.returncode == 0, done.stderr
    result = {}
    for model, ranks in ((model, ranks) for model in models for ranks in PLANS):
        names = [f"found-{rank}-of-{ranks}.pt" for rank in range(ranks)]
        shares = [torch.load(folder / name)[model] for name in names]
        parts = [Trained([share["loss"]], [share["gradients"]], {}) for share in shares]
        result[model, ranks] = join(parts)
    return result


def expected(model: str, ranks: int) -> Trained:
    return reference(Case(model, PLANS[ranks], ranks, MICROBATCHES, steps=1))


def _save(model: str, folder: Path, backend: str) -> None:
    """Compile a model for two and for four ranks; next to the programs its parameters and
    one batch."""
    problem = problem_of(model)
    (batch,) = problem.batches(1, 2 * MICROBATCHES)
    part, created = next(batch.parts(MICROBATCHES)), problem.model()
    microbatch = one_microbatch(Example(created, part.args, part.kwargs, problem.loss, part.target))
    exported = export_step(created, microbatch, problem.loss)
    choices = CompileOptions(exact=backend == "fx")
    for ranks, name in PLANS.items():
        schedule = build(name, ranks, MICROBATCHES)
        program = compile_program(created, microbatch, exported, schedule, choices)
        replace(program, step=StepOptions(backend=backend)).save(folder / f"{model} at {ranks}")
    kwargs = batch.kwargs if batch.target is None else {**batch.kwargs, "target": batch.target}
    inputs = {"state": created.state_dict(), "args": batch.args, "kwargs": kwargs}
    torch.save(inputs, folder / f"{model}.pt")
