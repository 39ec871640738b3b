"""Checkpoints that are written in a thread, and what a full disk leaves."""

import os
import re
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zbcompile
from benchmarks.damage_sweep import no_space
from tests.support.checkpointing import PROBLEM, SIZE, begin
from tests.support.pool import Pool
from zbcompile.persistence.checkpoint_directory import checkpoints_in

Error = zbcompile.PipelineError


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes inside: what writes meet on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def small_pipe() -> zbcompile.Pipeline:
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))
    options = {"schedule": "1f1b", "ranks": 2, "microbatches": 2, "loss": nn.functional.mse_loss}
    return zbcompile.pipeline(model, **options).compile(torch.randn(4, 4), target=torch.randn(4, 4))


def in_thread() -> bool:
    return threading.current_thread().name.startswith("AsyncCheckpointExecutor")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_bits_are_those_of_the_step(tmp_path: Path) -> None:
    """Tensors that change while a thread writes them. A load waits for the thread."""
    pipe = small_pipe()
    optimizer = torch.optim.Adam(pipe.parameters())
    for step in (1, 2, 3):
        for number, parameter in enumerate(pipe.parameters()):
            parameter.data.fill_(10 * step + number)
        zbcompile.save_checkpoint(tmp_path, pipe, optimizer, step=step, wait=False, keep=2)
        for parameter in pipe.parameters():
            parameter.data.fill_(-1)
    assert zbcompile.load_checkpoint(tmp_path, pipe, optimizer).step == 3
    pipe.close()
    assert names_in(tmp_path) == ["step-00000002", "step-00000003"]
    for step, path in enumerate(checkpoints_in(tmp_path), 2):
        zbcompile.load_checkpoint(path, pipe := small_pipe())
        values = [p.unique().tolist() for p in pipe.parameters()]
        assert values == [[10 * step + number] for number in range(4)]


LATER: dict[str, Callable[[Path, zbcompile.Pipeline], object]] = {
    "the next save": lambda path, pipe: zbcompile.save_checkpoint(path, pipe, step=3),
    "a load": zbcompile.load_checkpoint,
    "close": lambda _, pipe: pipe.close(),
}


@pytest.mark.parametrize("surfaces", LATER)
def test_an_error_of_the_thread_surfaces(surfaces: str, tmp_path: Path) -> None:
    pipe = small_pipe()
    zbcompile.save_checkpoint(tmp_path, pipe, step=1)
    with largest_file(1000):
        zbcompile.save_checkpoint(tmp_path, pipe, step=2, wait=False)
        for thread in threading.enumerate():
            if thread.name.startswith("AsyncCheckpointExecutor"):
                thread.join()
    said = r"step-00000002.partial was not finished: rank 0: OSError: .*File too large"
    with pytest.raises(Error, match=said):
        LATER[surfaces](tmp_path, pipe)
    zbcompile.save_checkpoint(tmp_path, pipe, step=3)
    pipe.close()
    assert names_in(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_full_disk_leaves_the_weights_that_were_there(tmp_path: Path) -> None:
    """Checkpoints: test_damage.py."""
    model = nn.Linear(64, 64)
    zbcompile.save_weights(tmp_path / "weights.safetensors", model)
    for size in (0, 5000):
        with largest_file(size), pytest.raises(Error, match="cannot be written: File too large"):
            zbcompile.save_weights(tmp_path / "weights.safetensors", nn.Linear(64, 64))
    before = model.weight.clone()
    zbcompile.load_weights(tmp_path / "weights.safetensors", model)
    assert torch.equal(model.weight, before)
    assert names_in(tmp_path) == ["weights.safetensors"]


def disk_of_one_rank_is_full(program: str, folder: Path) -> None:
    """Rank 1's, in a save that waits and in one in the background. After the first, no rank counts as
    one that waits: its watch would end the pipeline."""
    (pipe, optimizer), batch = begin(program), PROBLEM.batches(1, SIZE)[0]
    fails, fsync = mock.Mock(side_effect=lambda _: no_space()), os.fsync
    later = mock.Mock(side_effect=lambda handle: no_space() if in_thread() else fsync(handle))
    zbcompile.save_checkpoint(folder, pipe, optimizer, step=1)
    with mock.patch("os.fsync", fails if dist.get_rank() else fsync):
        with pytest.raises(Error, match="No space left"):
            zbcompile.save_checkpoint(folder, pipe, optimizer, step=2)
        assert not pipe._watch.position.waits
    pipe.step(*batch.args, target=batch.target)
    with mock.patch("os.fsync", later if dist.get_rank() else fsync):
        zbcompile.save_checkpoint(folder, pipe, optimizer, step=3, wait=False)
        said = "step-00000003.partial was not finished: rank 1: OSError: .*No space left"
        with pytest.raises(Error) as caught:
            zbcompile.save_checkpoint(folder, pipe, optimizer, step=4)
        assert re.search(said, str(caught.value))
    dist.barrier()
    assert names_in(folder) == ["step-00000001"]
    dist.barrier()
    zbcompile.save_checkpoint(folder, pipe, optimizer, step=5)
    pipe.step(*batch.args, target=batch.target)
    pipe.close()


@pytest.mark.slow
def test_a_full_disk_of_one_rank(
    small_program: Callable[[str, int], Path], pool: Pool, tmp_path: Path
) -> None:
    pool.run(disk_of_one_rank_is_full, str(small_program("zb-h1", 2)), tmp_path)
    assert names_in(tmp_path) == ["step-00000001", "step-00000005"]
