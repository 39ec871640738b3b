"""Bits flipped in checkpoints and programs, pickles put into them, and disks that are full at every
write.

    python -m tests.support.damage --checkpoints 500 --programs 150 --pickles --disks --kills 100

from the repository's root. A flipped bit must be refused with one line of ours; it is silent if what
was damaged is used and its values differ, raw if another exception than ours comes out. A pickle is
put in the place of every file in turn, and next to them under every name by which torch,
transformers and earlier releases know one: it is executed if unpickling it has left its mark. Of
processes that are killed with SIGKILL while they save, nothing that was committed may be lost,
every directory with a step's name must be whole and hold that step's bits, and the next save must
work immediately.
"""

import argparse
import errno
import io
import os
import pickle
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zbcompile
from zbcompile.persistence.checkpoint_directory import checkpoints_in

OURS = (zbcompile.PipelineError, zbcompile.CompileError)
Counts = Counter[str]


def flip_bit(folder: Path, chance: random.Random) -> tuple[Path, bytes]:
    """Flip one bit of one file, weighted by size; the file and what it held."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    (path,) = chance.choices(files, [path.stat().st_size ** 0.5 for path in files])
    before = path.read_bytes()
    content = bytearray(before)
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return path, before


def outcome_of(use: Callable[[], bool]) -> str:
    """Returns what came of using something damaged; `use` says whether its values are the right
    ones."""
    try:
        return "without effect" if use() else "silent"
    except OURS as error:
        return "refused" if "\n" not in str(error) else "refused in several lines"
    except Exception as error:
        return f"raw {type(error).__name__}"


def flip_checkpoints(folder: Path, flips: int, seed: int = 0) -> Counts:
    """Bits of a checkpoint with an optimizer, generators and extra: `verify_checkpoint` finds each,
    and a load refuses those in the index and in headers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    path = zbcompile.save_checkpoint(
        folder, model, optimizer, extra={"seen": [1, 2.5, torch.ones(4)]}, step=7
    )
    expected, counts, chance = (
        described(model, optimizer, path),
        Counter[str](),
        random.Random(seed),
    )

    def use() -> bool:
        second = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        return described(second, torch.optim.Adam(second.parameters()), path) == expected

    def verify() -> bool:
        zbcompile.verify_checkpoint(path)
        return True

    for _ in range(flips):
        damaged, before = flip_bit(path, chance)
        counts[f"verification: {outcome_of(verify)}"] += 1
        counts["index: " * (damaged.suffix == ".json") + outcome_of(use)] += 1
        damaged.write_bytes(before)
    assert use()
    return counts


def described(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> str:
    at = zbcompile.load_checkpoint(path, model, optimizer)
    torch.set_printoptions(threshold=10_000, precision=12)
    return repr(
        (at.step, at.extra, at.random, model.state_dict(), optimizer.state_dict()["param_groups"])
    ) + repr(
        sorted(
            (number, sorted(retained.items()))
            for number, retained in optimizer.state_dict()["state"].items()
        )
    )


def flip_programs(folder: Path, flips: int, seed: int = 0) -> Counts:
    """Bits of a saved program; its loss is compared."""
    program, chance, counts = save_program(folder), random.Random(seed), Counter[str]()
    expected = loss_of(program)
    for _ in range(flips):
        damaged, before = flip_bit(program, chance)
        counts[outcome_of(lambda: loss_of(program) == expected)] += 1
        damaged.write_bytes(before)
    return counts


def save_program(folder: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = zbcompile.pipeline(
        model, schedule="zb-h1", ranks=2, microbatches=4, loss=nn.functional.mse_loss
    )
    pipe.compile(torch.ones(4, 4), target=torch.ones(4, 4)).program.save(folder / "program")
    return folder / "program"


def loss_of(program: Path, **options: Any) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = zbcompile.load(program, model.state_dict(), **options)
    try:
        return float(pipe.step(torch.ones(4, 4), target=torch.ones(4, 4)))
    finally:
        pipe.close()


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def pickles(mark: Path) -> list[bytes]:
    """A trap as pickle, torch.save and its older format write it."""
    saved = [io.BytesIO(), io.BytesIO()]
    for file, zipped in zip(saved, (True, False), strict=True):
        torch.save(Trap(mark), file, _use_new_zipfile_serialization=zipped)
    return [pickle.dumps(Trap(mark)), *(file.getvalue() for file in saved)]


PICKLED_NAMES = (
    ".metadata",
    "__0_0.distcp",
    "process.pt",
    "pytorch_model.bin",
    "optimizer.pt",
    "data.pkl",
    "extra.pt",
)


def planted(folder: Path, mark: Path, use: Callable[[], bool]) -> Counts:
    """A pickle in the place of every file of `folder`, and under every name that is not there. Of a
    cache, whose files are many and alike, some are taken."""
    counts, complete = Counter[str](), folder.with_name("whole")
    shutil.copytree(folder, complete)
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    files = files[:: 1 + len(files) // 20]
    for name in (*files, *map(Path, PICKLED_NAMES)):
        for content in pickles(mark):
            (folder / name).write_bytes(content)
            outcome = outcome_of(use)
            counts["executed" if mark.exists() else outcome] += 1
            mark.unlink(missing_ok=True)
            shutil.rmtree(folder)
            shutil.copytree(complete, folder)
    shutil.rmtree(complete)
    return counts


def plant_pickles(folder: Path) -> Counts:
    """In a checkpoint, in one that torch.distributed.checkpoint wrote, in a folder of weights, in a and a
    program."""
    mark, counts = folder / "mark", Counter[str]()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    path = zbcompile.save_checkpoint(
        folder / "own", model, extra={"seen": [1, torch.ones(4)]}, step=7
    )
    foreign, weights = folder / "foreign", folder / "weights"
    dcp.save({"model": model.state_dict(), "trap": Trap(mark)}, checkpoint_id=foreign, no_dist=True)
    zbcompile.save_weights(weights, piped(model))
    values, program = model.state_dict(), save_program(folder)
    plain = loss_of(program)
    places: dict[Path, Callable[[], bool]] = {
        path: lambda: loads(lambda new: zbcompile.load_checkpoint(path.parent, new), values),
        foreign: lambda: loads(lambda new: zbcompile.load_checkpoint(foreign, new), values),
        weights: lambda: loads(lambda new: zbcompile.load_weights(weights, piped(new)), values),
        program: lambda: loss_of(program) == plain,
    }
    for place, use in places.items():
        result = planted(place, mark, use)
        print(f"  {place.name}: {dict(result)}", flush=True)
        counts += result
    return counts


def piped(model: nn.Module) -> zbcompile.Pipeline:
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", ranks=2, microbatches=2, loss=nn.functional.mse_loss
    )
    return pipe.compile(torch.ones(4, 8), target=torch.ones(4, 8))


def loads(load: Callable[[nn.Module], object], values: dict[str, torch.Tensor]) -> bool:
    """Returns whether a new model has these values then."""
    second = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    load(second)
    return all(torch.equal(value, values[name]) for name, value in second.state_dict().items())


CALLS = ("os.fsync", "os.replace", "os.mkdir", "os.rename", "os.unlink", "os.open", "io.open")


@contextmanager
def full_at(number: int, folder: Path) -> Iterator[list[str]]:
    """The `number`th call inside that writes in `folder` meets a full disk; gives the calls that
    were made."""
    created: list[str] = []

    def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if writes(name, args, folder):
                created.append(name)
                if len(created) == number + 1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
            return real(*args, **kwargs)

        return call

    with mock.patch.multiple(
        "os", **{n[3:]: failing(n, getattr(os, n[3:])) for n in CALLS if n.startswith("os.")}
    ):
        yield created


def writes(name: str, args: tuple[Any, ...], folder: Path) -> bool:
    if name == "os.open":
        return str(args[0]).startswith(str(folder)) and bool(args[1] & (os.O_WRONLY | os.O_RDWR))
    return name == "os.fsync" or str(args[0]).startswith(str(folder))


def fill_disks(folder: Path) -> Counts:
    """A full disk at every call of a save in turn: one message with a path, and the checkpoint
    before stays."""
    counts, model = Counter[str](), nn.Linear(4, 4)
    first = zbcompile.save_checkpoint(folder, model, step=1)
    for number in range(1000):
        with full_at(number, folder) as created:
            outcome = outcome_of(lambda: zbcompile.save_checkpoint(folder, model, step=2).is_dir())
        if len(created) <= number:
            return counts
        left = [path.name for path in folder.iterdir() if path.name.startswith(".step")]
        counts[
            outcome if not left else f"{outcome}, and left {left} at call {number}, {created[-1]}"
        ] += 1
        for path in checkpoints_in(folder):
            zbcompile.load_checkpoint(path, model)
            if path != first:
                shutil.rmtree(path)
        assert first.exists()
    raise AssertionError("a save never ended")


KEEP = 3


def trained_pipe() -> zbcompile.Pipeline:
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


def kill_saves(folder: Path, kills: int, seed: int = 0) -> Counts:
    """Returns what the kills left, by kind."""
    chance, pipe, step, counts = random.Random(seed), trained_pipe(), 0, Counter[str]()
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
    campaigns = {"checkpoints": flip_checkpoints, "programs": flip_programs, "kills": kill_saves}
    for name in campaigns:
        parser.add_argument(f"--{name}", type=int, default=0, metavar="COUNT")
    parser.add_argument("--pickles", action="store_true")
    parser.add_argument("--disks", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, run in campaigns.items():
        if count := getattr(options, name):
            with tempfile.TemporaryDirectory() as folder:
                counts = run(Path(folder), count, options.seed)
                print(f"{count} {name}: {dict(counts)}", flush=True)
    if options.pickles:
        with tempfile.TemporaryDirectory() as folder:
            print(f"pickles: {dict(plant_pickles(Path(folder)))}", flush=True)
    if options.disks:
        with tempfile.TemporaryDirectory() as folder:
            print(f"full disks: {dict(fill_disks(Path(folder)))}")


if __name__ == "__main__":
    main()
