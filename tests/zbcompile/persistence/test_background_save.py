"""Checkpoints that are written in a thread, and what a full disk leaves."""

import errno
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
from torch import nn

import zbcompile
from tests.support.checkpointing import PROBLEM, SIZE, begin
from tests.support.oracle import optimizer_of
from tests.support.pool import Pool
from zbcompile.persistence.checkpoint_directory import checkpoints_in


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
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", ranks=2, microbatches=2, loss=nn.functional.mse_loss
    )
    return pipe.compile(torch.randn(4, 4), target=torch.randn(4, 4))


def test_a_load_waits_for_the_save(tmp_path: Path) -> None:
    pipe = small_pipe()
    zbcompile.save_checkpoint(tmp_path, pipe, step=5, wait=False)
    assert zbcompile.load_checkpoint(tmp_path, pipe).step == 5
    pipe.close()


def test_the_bits_are_those_of_the_step(tmp_path: Path) -> None:
    """Tensors that change while a thread writes them."""
    pipe = small_pipe()
    optimizer = torch.optim.Adam(pipe.parameters())
    for step in (1, 2, 3):
        for number, parameter in enumerate(pipe.parameters()):
            parameter.data.fill_(10 * step + number)
        path = zbcompile.save_checkpoint(tmp_path, pipe, optimizer, step=step, wait=False, keep=2)
        for parameter in pipe.parameters():
            parameter.data.fill_(-1)
        assert path.name == f"step-{step:08d}"
    pipe.close()
    assert [item.name for item in checkpoints_in(tmp_path)] == ["step-00000002", "step-00000003"]
    for step, path in enumerate(checkpoints_in(tmp_path), 2):
        zbcompile.load_checkpoint(path, pipe := small_pipe())
        assert [p.unique().tolist() for p in pipe.parameters()] == [
            [10 * step + n] for n in range(4)
        ]


@pytest.mark.parametrize("surfaces", ["the next save", "a load", "close"])
def test_an_error_of_the_thread_surfaces(surfaces: str, tmp_path: Path) -> None:
    pipe = small_pipe()
    zbcompile.save_checkpoint(tmp_path, pipe, step=1)
    with largest_file(1000):
        zbcompile.save_checkpoint(tmp_path, pipe, step=2, wait=False)
        for thread in threading.enumerate():
            if thread.name.startswith("AsyncCheckpointExecutor"):
                thread.join()
    later: dict[str, Callable[[], object]] = {
        "the next save": lambda: zbcompile.save_checkpoint(tmp_path, pipe, step=3),
        "a load": lambda: zbcompile.load_checkpoint(tmp_path, pipe),
        "close": pipe.close,
    }
    with pytest.raises(
        zbcompile.PipelineError,
        match=r"step-00000002.partial was not finished: rank 0: OSError: .*File too large",
    ):
        later[surfaces]()
    zbcompile.save_checkpoint(tmp_path, pipe, step=3)
    pipe.close()
    assert [item.name for item in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000003"]


def test_a_plain_model_is_saved_at_once(tmp_path: Path) -> None:
    with pytest.raises(zbcompile.PipelineError, match="wait=False needs a pipeline"):
        zbcompile.save_checkpoint(tmp_path, nn.Linear(1, 1), wait=False)


@pytest.mark.parametrize("size", [0, 100, 2000, 5000])
def test_a_full_disk_is_one_message_and_leaves_what_was_there(size: int, tmp_path: Path) -> None:
    """Within the part, its entries, the record: each is met by one of the sizes."""
    model = nn.Linear(16, 16)
    first = zbcompile.save_checkpoint(tmp_path, model, step=1)
    with largest_file(size), pytest.raises(zbcompile.PipelineError, match=str(tmp_path)):
        zbcompile.save_checkpoint(tmp_path, model, step=2)
    assert list(tmp_path.iterdir()) == [first]
    with (
        largest_file(size),
        pytest.raises(zbcompile.PipelineError, match=r"cannot be written: File too large"),
    ):
        (
            zbcompile.save_weights(tmp_path / "weights.safetensors", model)
            if size < 1000
            else zbcompile.save_weights(tmp_path / "weights.safetensors", nn.Linear(64, 64))
        )
    assert list(tmp_path.iterdir()) == [first]
    zbcompile.load_checkpoint(tmp_path, model)


def full_disk(handle: int) -> None:
    if threading.current_thread().name.startswith("AsyncCheckpointExecutor"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_in_the_background(program: str, folder: str) -> None:
    """Rank 1's disk is full in the second of three saves."""
    pipe, optimizer = begin(program)
    batch = PROBLEM.batches(1, SIZE)[0]
    pipe.step(*batch.args, target=batch.target)
    optimizer.step()
    zbcompile.save_checkpoint(folder, pipe, optimizer)
    pipe.step(*batch.args, target=batch.target)
    with mock.patch("os.fsync", full_disk if torch.distributed.get_rank() else os.fsync):
        zbcompile.save_checkpoint(folder, pipe, optimizer, wait=False)
        try:
            zbcompile.save_checkpoint(folder, pipe, optimizer, step=9)
        finally:
            pipe.close()


@pytest.mark.slow
def test_the_first_rank_waits_for_the_parts_of_all(
    small_program: Callable[[str, int], Path], pool: Pool, tmp_path: Path
) -> None:
    program = str(small_program("zb-h1", 2))
    outcomes = pool.outcomes(save_in_the_background, program, str(tmp_path))
    assert [outcome.error for outcome in outcomes] == ["PipelineError"] * 2
    result = r"step-00000002.partial was not finished: rank 1: OSError: .*No space left"
    assert all(re.search(result, outcome.text) for outcome in outcomes)
    assert [item.name for item in sorted(tmp_path.iterdir())] == ["step-00000001"]
    model = PROBLEM.model()
    zbcompile.load_checkpoint(tmp_path, model, optimizer_of(model.parameters()))


def refused(program: str, folder: str) -> None:
    """Rank 1's disk is full. Afterwards no rank counts as one that waits: its watch would end the
    pipeline."""
    pipe, optimizer = begin(program)
    batch = PROBLEM.batches(1, SIZE)[0]
    pipe.step(*batch.args, target=batch.target)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with mock.patch("os.fsync", full if torch.distributed.get_rank() else os.fsync):
        with pytest.raises(zbcompile.PipelineError, match="No space left"):
            zbcompile.save_checkpoint(folder, pipe, optimizer)
        assert not pipe._watch.position.waits
    zbcompile.save_checkpoint(folder, pipe, optimizer)
    pipe.step(*batch.args, target=batch.target)


@pytest.mark.slow
def test_after_a_refused_save_all_goes_on(
    small_program: Callable[[str, int], Path], pool: Pool, tmp_path: Path
) -> None:
    pool.run(refused, str(small_program("zb-h1", 2)), str(tmp_path))
