"""Training over a mesh, small, and the sweep that holds schedules next to replicas against one
process."""

import contextlib
import io
import re

import pytest

import train_llama
from tests.support.pool import Pool

SIZES = {"layers": 1, "width": 16, "sequence-length": 8, "batch": 4, "microbatches": 2, "steps": 8}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def trained(*arguments: str) -> str:
    """Returns what the job prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_llama.run(train_llama.parse([*SMALL, *arguments]))
    return printed.getvalue()


@pytest.mark.slow
def test_two_processes(pool: Pool) -> None:
    """Which share each matrix; the dimensions of larger meshes together:
    `engine/test_dtensor.py`."""
    printed, second = pool.run(
        trained, "--dp", "1", "--pp", "1", "--schedule", "zb-h1", "--verify", ranks=2
    )
    assert second == ""
    differs = re.search(
        r"loss differs by ([\d.e+-]+) of it, gradients by at most ([\d.e+-]+) of", printed
    )
    assert differs, printed
    assert max(float(differs[1]), float(differs[2])) <= 2e-6
    losses = re.search(r"validation loss: ([\d.]+) before, ([\d.]+) after 8 steps", printed)
    assert losses, printed
    assert float(losses[2]) < float(losses[1])


def test_processes_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_llama.parse(["--dp", "3"])
    assert (
        "--dp 3 --pp 2 --tp 2 is for 12 processes, and there are 1: torchrun"
        in capsys.readouterr().err
    )
