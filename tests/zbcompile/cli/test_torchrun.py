"""A script as a user writes it, started by torchrun: it initialises no process group and names no
rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpt import GPT, next_byte_loss
from tests.support.oracle import Batch, eager_step

pytestmark = pytest.mark.several_processes

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import torch
import zbcompile
from gpt import GPT, next_byte_loss

torch.manual_seed(0)
model = GPT(layers=2, width=32, heads=2, length=16)
pipe = zbcompile.pipeline(model, schedule="zbv", microbatches=4, loss=next_byte_loss, exact=True)
tokens = torch.randint(0, 256, (8, 17))
losses = []
optimizer = None
for _ in range(2):
    losses.append(pipe.step(tokens[:, :-1].contiguous(), target=tokens[:, 1:].contiguous()))
    optimizer = optimizer or torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    optimizer.step()
    optimizer.zero_grad()
state = pipe.state_dict(full=True)
if torch.distributed.get_rank() == 0:
    torch.save([torch.stack(losses), state], {output!r})
torch.distributed.destroy_process_group()
"""


def eager() -> tuple[Tensor, dict[str, Tensor]]:
    """Returns what the script computes, without a pipeline: the losses and the state after
    training."""
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, heads=2, length=16)
    tokens = torch.randint(0, 256, (8, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        losses.append(
            eager_step(model, next_byte_loss, Batch((tokens[:, :-1],), {}, tokens[:, 1:]), 4, 0)
        )
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), model.state_dict()


def start(command: list[str], script: str, folder: Path, name: str) -> Path:
    """Write the script, run it, and return the file that it saved."""
    output, path = folder / f"{name}.pt", folder / f"{name}.py"
    path.write_text(script.format(output=str(output)))
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(path)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return output


@pytest.mark.slow
def test_two_processes_train_as_eager_does(tmp_path: Path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    losses, state = torch.load(start(torchrun, SCRIPT, tmp_path, "pipelined"))
    eager_losses, eager_state = eager()
    assert torch.equal(losses, eager_losses)
    assert list(state) == list(eager_state)
    assert all(torch.equal(state[name], eager_state[name]) for name in state)
