"""Processes that are killed with SIGKILL while they save, and what must be there afterwards.

    python -m tests.support.killed_saves --kills 100        from the repository's root

A forked child saves as fast as it can, every other run in a thread, and says which steps are
committed. Nothing that was committed may be lost, every directory with a step's name must be whole
and hold that step's bits, and the next save must work immediately.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from torch import nn

import zbcompile
from zbcompile.persistence.checkpoint_directory import checkpoints_in

KEEP = 3


def make_pipe() -> zbcompile.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", ranks=2, microbatches=2, loss=nn.functional.mse_loss
    )
    return pipe.compile(torch.randn(4, 64), target=torch.randn(4, 64))


def save_without_end(folder: Path, pipe: Any, first: int, background: bool, said: int) -> None:
    """In the child: every tensor of step n is filled with n; a step is said once it is
    committed."""
    for step in range(first, 1_000_000):
        for parameter in pipe.parameters():
            parameter.data.fill_(step)
        zbcompile.save_checkpoint(
            folder, pipe, step=step, extra={"step": step}, keep=KEEP, wait=not background
        )
        committed = step - int(background)  # the one before has been waited for
        os.write(said, f"{committed}\n".encode())


def run_and_kill(folder: Path, pipe: Any, first: int, background: bool, after: float) -> int:
    """The last step that was said to be committed, of a child that is killed `after` seconds after
    its first one."""
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_without_end(folder, pipe, first, background, said)
        finally:
            os._exit(1)
    os.close(said)
    with open(heard, "rb") as lines:
        begun = lines.readline()
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        rest = lines.read().split()
    assert os.WIFSIGNALED(status), "the child ended by itself"
    return int(rest[-1] if rest else begun)


def require_nothing_lost(folder: Path, committed: int) -> int:
    """The newest step, which is the committed one or a later one; all are whole, with their own
    bits."""
    result = checkpoints_in(folder)
    assert 1 <= len(result) <= KEEP + 1, result
    for path in result:
        zbcompile.verify_checkpoint(path)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        at = zbcompile.load_checkpoint(path, model)
        assert path.name == f"step-{at.step:08d}"
        assert at.extra == {"step": at.step}
        assert all(bool((parameter == at.step).all()) for parameter in model.parameters())
    newest = zbcompile.load_checkpoint(folder, model).step
    assert newest >= committed, (newest, committed)
    return newest


def kill_saves(folder: Path, kills: int, seed: int = 0) -> dict[str, int]:
    """Returns what the kills left, by kind."""
    chance, pipe, step = random.Random(seed), make_pipe(), 0
    counts = {
        "kills": 0,
        "in a plain save": 0,
        "in an asynchronous save": 0,
        "left half a checkpoint": 0,
    }
    for number in range(kills):
        background = bool(number % 2)
        committed = run_and_kill(folder, pipe, step + 1, background, chance.random() * 0.1)
        counts["kills"] += 1
        counts["in an asynchronous save" if background else "in a plain save"] += 1
        counts["left half a checkpoint"] += any(folder.glob(".step-*"))
        step = require_nothing_lost(folder, committed)
    pipe.close()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(
            kill_saves(Path(folder), options.kills, options.seed), "and nothing committed was lost"
        )


if __name__ == "__main__":
    main()
