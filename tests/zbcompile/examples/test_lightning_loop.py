"""The loop by Lightning next to eager's, in one process and under torchrun."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("lightning")

import lightning_loop as loop
from tests.support.warm_torchrun import warm_torchrun


def eager() -> list[float]:
    """The losses of an epoch."""
    losses, net = [], loop.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=loop.LEARNING_RATE)
    for inputs, target in loop.loader(0):
        losses.append(torch.zeros(()))
        parts = inputs.chunk(loop.MICROBATCHES), target.chunk(loop.MICROBATCHES)
        for x, y in zip(*parts, strict=True):
            loss = cross_entropy(net(x), y) / loop.MICROBATCHES
            loss.backward()
            losses[-1] = losses[-1] + loss.detach()
        torch.nn.utils.clip_grad_norm_(net.parameters(), loop.CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.beyond_sample)])
def test_the_losses_of_eager(ranks: int) -> None:
    """Bit for bit, with exact=True, in one process and in two."""
    if ranks == 1:
        assert loop.train(ranks=2) == eager()
        return
    script = str(Path(loop.__file__).resolve())
    command = warm_torchrun(
        "import lightning, zbcompile.run", "--standalone", "--nproc-per-node=2", script
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-4000:]
    (losses,) = re.findall(r"losses (\[.*?\])", run.stdout)
    assert json.loads(losses) == eager()
