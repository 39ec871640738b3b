"""The loop by Lightning next to eager's, in one process and under torchrun."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

pytest.importorskip("lightning")

from lightning_loop import CLIP, LEARNING_RATE, MICROBATCHES, loader, model, train
from tests.support.warm_torchrun import warm_torchrun

pytestmark = pytest.mark.several_processes

SCRIPT = Path(__file__).parents[3] / "examples" / "lightning_loop.py"


def eager(net: nn.Module, after: Callable[[], object] = lambda: None) -> list[float]:
    """The losses of an epoch; `after` is called behind every update."""
    losses = []
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
    for inputs, target in loader(0):
        parts = zip(inputs.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
        result = [cross_entropy(net(x), y) / MICROBATCHES for x, y in parts]
        for loss in result:
            loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(sum(loss.detach() for loss in result).item())  # type: ignore[union-attr]
    return losses


@pytest.mark.slow
def test_the_losses_of_eager() -> None:
    """Bit for bit, with exact=True."""
    assert train(ranks=2) == eager(model())


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_the_losses_of_eager_in_two_processes() -> None:
    command = warm_torchrun(
        "import lightning, zbcompile.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)
    )
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (losses,) = re.findall(r"losses (\[.*?\])", done.stdout)
    assert json.loads(losses) == eager(model())
