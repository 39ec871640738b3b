"""Programs compiled here and run by fresh processes, at two and four ranks, that cannot import the models' source.

Four processes run each program of four ranks together, and then in two pairs those of two ranks.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.test_nodes import free_port
from tests.runtime.training import Case, Trained, assert_same_tensors, join, problem_of, reference
from zbcompile.compiler import compile_drawn, draw_step
from zbcompile.example import Example
from zbcompile.inspected import one_microbatch
from zbcompile.passes.choices import Choices
from zbcompile.schedules import build

ROOT = Path(__file__).parents[2]
MODELS = ("gpt-tied", "llama", "vit", "unet")
PLANS = {2: "zb-v", 4: "zb-h1"}  # ranks: schedule; both have four stages
MICROBATCHES = 4
SCRIPT = """
import sys
sys.modules.update(dict.fromkeys(("transformers", "gpt", "tests", "examples")))  # now nobody can import these
import torch, zbcompile
from torch.distributed.device_mesh import init_device_mesh

def run(model, ranks, mesh=None):
    given = torch.load(f"{model}.pt")
    pipe = zbcompile.load(f"{model} at {ranks}", given["state"], mesh=mesh)
    loss = pipe.step(*given["args"], **given["kwargs"])
    found = {"loss": loss, "gradients": {name: p.grad for name, p in pipe.named_parameters()}}
    pipe.close()
    return found

models = sys.argv[1:]
found = {f"{model} at 4": run(model, 4) for model in models}
rank = torch.distributed.get_rank()
pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "pp"))["pp"]
found |= {f"{model} at 2": run(model, 2, pair) for model in models[2 * (rank // 2):][:2]}
torch.save(found, f"found-{rank}.pt")
torch.distributed.destroy_process_group()
"""


def save(model: str, folder: Path) -> None:
    """Compile a model for two and for four ranks; beside the programs its parameters and one batch."""
    problem = problem_of(model)
    (batch,) = problem.batches(1, 2 * MICROBATCHES)
    part = next(batch.parts(MICROBATCHES))
    made = problem.model()
    microbatch = one_microbatch(Example(made, part.args, part.kwargs, problem.loss, part.target))
    choices = Choices(exact=True)
    drawn = draw_step(made, microbatch, problem.loss, choices)
    for ranks, name in PLANS.items():
        schedule = build(name, ranks, MICROBATCHES)
        compile_drawn(made, microbatch, drawn, schedule, choices, {}).save(folder / f"{model} at {ranks}")
    target = {} if batch.target is None else {"target": batch.target}
    given = {"state": made.state_dict(), "args": batch.args, "kwargs": {**batch.kwargs, **target}}
    torch.save(given, folder / f"{model}.pt")


def start(rank: int, port: int, folder: Path) -> subprocess.Popen[str]:
    place = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    environment = {**os.environ, **place, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, *MODELS]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the four processes found."""
    folder, port = tmp_path_factory.mktemp("alone"), free_port()
    for model in MODELS:
        save(model, folder)
    (folder / "zbcompile").symlink_to(ROOT / "zbcompile")  # all of this repository that they can import
    processes = [start(rank, port, folder) for rank in range(4)]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(said)
    return [torch.load(folder / f"found-{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("ranks", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_eagers_bits(model: str, ranks: int, found: list[dict[str, Any]]) -> None:
    shares = [each[f"{model} at {ranks}"] for each in found if f"{model} at {ranks}" in each]
    assert len(shares) == ranks
    ours = join([Trained([share["loss"]], [share["gradients"]], {}) for share in shares])
    theirs = reference(Case(model, PLANS[ranks], ranks, MICROBATCHES, steps=1))
    assert_same_tensors(ours.losses, theirs.losses, "loss of step")
    assert_same_tensors(ours.gradients[0], theirs.gradients[0], "gradient of")
