"""Bits flipped in checkpoints and programs, programs edited by somebody who computes every hash again,
pickles, disks that are full and processes that are killed at every write.

    python examples/benchmarks/damage_sweep.py --checkpoints 500 --programs 150 --edits 300 --kills 100 --pickles 1 --disks 1

from the repository's root. What is damaged must be refused with one line of ours; it is silent if
it is used and its values differ (of an edited program: another program), raw if another exception
than ours comes out, executed if a payload has left its mark. A pickle is put in the place of every
file in turn, and under every name by which torch, transformers and earlier releases know one. Of
processes that are killed while they save, nothing that was committed may be lost, every directory
with a step's name must be whole and hold that step's bits, and the next save must work.
"""

import argparse
import errno
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zbcompile
from zbcompile.persistence.checkpoint_directory import checkpoints_in
from zbcompile.program.directory import digest_of

OURS = (zbcompile.PipelineError, zbcompile.CompileError)
KEEP = 3
Counts = Counter[str]


INPUTS = torch.ones(4, 8)


def layers(words: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=not words))


class Branching(nn.Module):
    """A model with a constant, a buffer that no state dict holds, a branch and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.scale = torch.full((8,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        values, _ = (self.layers(x) + self.table).sort(-1)
        values = torch.cond(x.sum() > 2, torch.sin, torch.cos, (values * self.scale,))
        return self.layers(torch.tanh(values))


PROGRAMS: dict[str, tuple[Any, Tensor, dict[str, Any]]] = {
    "layers": (layers, INPUTS, {}),
    "steps": (Branching, INPUTS, {}),
    "words": (
        partial(layers, words=True),
        torch.arange(4),
        {"vocab": 1, "schedule": "1f1b", "loss": nn.functional.cross_entropy},
    ),
}


def piped(model: nn.Module, target: Tensor = INPUTS, **options: Any) -> zbcompile.Pipeline:
    usual = {"schedule": "zb-h1", "ranks": 2, "microbatches": 2, "loss": nn.functional.mse_loss}
    return zbcompile.pipeline(model, **{**usual, **options}).compile(INPUTS, target=target)


def save_program(folder: Path, name: str = "layers") -> Path:
    make, target, options = PROGRAMS[name]
    piped(make(), target, **options).program.save(folder / name)
    return folder / name


def numbers_of(program: Path, name: str = "layers") -> str:
    """The loss and the gradients of a step of the program."""
    make, target, _ = PROGRAMS[name]
    pipe = zbcompile.load(program, make().state_dict())
    try:
        loss = pipe.step(INPUTS, target=target)
        return repr((loss, [(key, value.grad) for key, value in pipe.named_parameters()]))
    finally:
        pipe.close()


def has_numbers(program: Path, name: str, numbers: str) -> bool:
    return numbers_of(program, name) == numbers


def outcome_of(use: Callable[[], bool | None]) -> str:
    """Returns what came of using something damaged; `use` says whether its values are the right ones."""
    try:
        return "silent" if use() is False else "without effect"
    except OURS as error:
        return "refused" if "\n" not in str(error) else "refused in several lines"
    except Exception as error:
        return f"raw {type(error).__name__}"


@contextmanager
def flipped_bit(folder: Path, chance: random.Random) -> Iterator[Path]:
    """One bit of one file, weighted by size, is another one inside."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    (path,) = chance.choices(files, [path.stat().st_size ** 0.5 for path in files])
    before = path.read_bytes()
    content = bytearray(before)
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    yield path
    path.write_bytes(before)


def flip_checkpoints(folder: Path, flips: int, seed: int = 0) -> Counts:
    """Bits of a checkpoint with an optimizer, generators and extra: `verify_checkpoint` finds each,
    and a load refuses those in the index and in headers."""
    model, counts, chance = layers(), Counter[str](), random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    extra = {"seen": [1, 2.5, torch.ones(4)]}
    path = zbcompile.save_checkpoint(folder, model, optimizer, extra=extra, step=7)
    torch.set_printoptions(threshold=10_000, precision=12)

    def read() -> str:
        model = layers()
        optimizer = torch.optim.Adam(model.parameters())
        at = zbcompile.load_checkpoint(path, model, optimizer)
        return repr((at.step, at.extra, at.random, model.state_dict(), optimizer.state_dict()))

    expected = read()
    for _ in range(flips):
        with flipped_bit(path, chance) as damaged:
            found = outcome_of(partial(zbcompile.verify_checkpoint, path))
            counts[f"verification: {found}"] += 1
            outcome = outcome_of(lambda: read() == expected)
            counts["index: " * (damaged.suffix == ".json") + outcome] += 1
    assert read() == expected
    return counts


def flip_programs(folder: Path, flips: int, seed: int = 0) -> Counts:
    """Bits of a saved program; its loss is compared."""
    program, chance, counts = save_program(folder), random.Random(seed), Counter[str]()
    expected = numbers_of(program)
    for _ in range(flips):
        with flipped_bit(program, chance):
            counts[outcome_of(lambda: numbers_of(program) == expected)] += 1
    return counts


MARK = Path(tempfile.gettempdir()) / "zbcompile-hostile-program"
CODE = f"__import__('os').system('touch {MARK}')"
OTHERS = '["__class__", "exec", "a b", "", "\\ud800", null, [], {}, -1, 0, 1, 7, 1e30, 0.5, true]'
VALUES = [*json.loads(OTHERS), CODE, f'"); {CODE}; ("', 2**31, 2**63, 10**30, {"node": 0}]
WATCHED = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class")


def places_of(data: Any) -> list[tuple[Any, Any]]:
    """The container and the key of every value in JSON data."""
    keys = list(data) if isinstance(data, dict) else range(len(data))
    nested = [data[key] for key in keys if isinstance(data[key], dict | list)]
    return [(data, key) for key in keys] + [place for inner in nested for place in places_of(inner)]


def edit(program: Path, chance: random.Random) -> str:
    """Changes one value of one JSON file, and all hashes. Returns a description of the edit."""
    file = chance.choice(sorted(program.glob("*.json")))
    places = places_of(data := json.loads(file.read_text()))
    (container, key), (elsewhere, name) = chance.choice(places), chance.choice(places)
    value = json.loads(json.dumps(chance.choice([elsewhere[name], *VALUES])))
    before, kind = f"{container[key]!r:.60}", chance.random()
    if kind < 0.2:
        container.pop(key)
    elif kind < 0.3 and isinstance(container, dict):
        container[str(value)] = container.pop(key)
    else:
        container[key] = value
    file.write_text(json.dumps(data))
    manifest = json.loads((program / "manifest.json").read_text())
    if file.name in (manifest.get("files") or {}):
        manifest["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (program / "manifest.json").write_text(json.dumps({**manifest, "digest": digest_of(manifest)}))
    return f"{file.name}: {key}: {before} -> {value!r:.60} ({kind:.1f})"


def edit_programs(folder: Path, edits: int, seed: int = 0) -> Counts:
    """Prints the edits that were neither refused nor without effect. Processes, pickles and the mark
    of a payload are watched."""
    chance, counts, events = random.Random(seed), Counter[str](), list[str]()
    names = ("steps", "words")
    expected = {name: numbers_of(save_program(folder, name), name) for name in names}
    sys.addaudithook(lambda event, _: events.append(event) if event in WATCHED else None)
    for number in range(edits):
        name, copy = chance.choice(names), folder / "edited"
        shutil.copytree(folder / name, copy)
        description = edit(copy, chance)
        events.clear()
        signal.alarm(120)  # ends a run that hangs
        outcome = outcome_of(partial(has_numbers, copy, name, expected[name]))
        signal.alarm(0)
        if events or MARK.exists():
            outcome = f"executed {events}"
        MARK.unlink(missing_ok=True)
        counts[outcome] += 1
        if outcome not in ("refused", "without effect"):
            print(f"{number}, {name}: {description}: {outcome}")
        shutil.rmtree(copy)
    return counts


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


PICKLED = ".metadata __0_0.distcp process.pt pytorch_model.bin optimizer.pt data.pkl extra.pt"


def plant_pickles(folder: Path, *_: int) -> Counts:
    """A pickle in the place of every file, and under every name that is not there, of a checkpoint,
    of one that torch.distributed.checkpoint wrote, of a folder of weights, and of a program."""
    mark, counts, model = folder / "mark", Counter[str](), layers()
    extra = {"seen": [1, torch.ones(4)]}
    own = zbcompile.save_checkpoint(folder / "own", model, extra=extra, step=7)
    foreign, weights, program = folder / "foreign", folder / "weights", save_program(folder)
    dcp.save({"model": model.state_dict(), "trap": Trap(mark)}, checkpoint_id=foreign, no_dist=True)
    zbcompile.save_weights(weights, piped(model))
    values, loss = model.state_dict(), numbers_of(program)

    def loads(load: Callable[[nn.Module], object]) -> bool:
        """Returns whether a new model has the values then."""
        for parameter in (second := layers()).parameters():
            nn.init.zeros_(parameter)
        load(second)
        return all(torch.equal(value, values[name]) for name, value in second.state_dict().items())

    places: dict[Path, Callable[[], bool]] = {
        own: lambda: loads(lambda new: zbcompile.load_checkpoint(own.parent, new)),
        foreign: lambda: loads(lambda new: zbcompile.load_checkpoint(foreign, new)),
        weights: lambda: loads(lambda new: zbcompile.load_weights(weights, piped(new))),
        program: lambda: numbers_of(program) == loss,
    }
    for place, use in places.items():
        files = [path.relative_to(place) for path in sorted(place.rglob("*")) if path.is_file()]
        shutil.copytree(place, complete := folder / "whole")
        for name in map(str, (*files, *PICKLED.split())):
            for content in pickles(mark):
                (place / name).write_bytes(content)
                outcome = outcome_of(use)
                counts[f"{place.name}: {'executed' if mark.exists() else outcome}"] += 1
                mark.unlink(missing_ok=True)
                shutil.rmtree(place)
                shutil.copytree(complete, place)
        shutil.rmtree(complete)
    return counts


CALLS = ("fsync", "replace", "mkdir", "rename", "unlink", "open")


@contextmanager
def at_call(number: int, folder: Path, act: Callable[[], object]) -> Iterator[list[str]]:
    """`act` comes before the `number`th call inside that writes in `folder`; gives the calls made."""
    made: list[str] = []

    def acting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            reads = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR)
            if name == "fsync" or (str(args[0]).startswith(str(folder)) and not reads):
                made.append(name)
                if len(made) == number + 1:
                    act()
            return real(*args, **kwargs)

        return call

    calls: Any = {name: acting(name, getattr(os, name)) for name in CALLS}
    with mock.patch.multiple("os", **calls):
        yield made


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_disks(folder: Path, *_: int) -> Counts:
    """A full disk at every call of a save in turn: one message with a path, and the checkpoint
    before stays."""
    counts, model = Counter[str](), nn.Linear(4, 4)
    first = zbcompile.save_checkpoint(folder, model, step=1)
    for number in range(1000):
        with at_call(number, folder, no_space) as made:
            outcome = outcome_of(lambda: zbcompile.save_checkpoint(folder, model, step=2).is_dir())
        if len(made) <= number:
            return counts
        left = [path.name for path in folder.iterdir() if path.name.startswith(".step")]
        counts[f"{outcome}, and left {left} at call {number}, {made[-1]}" if left else outcome] += 1
        for path in checkpoints_in(folder):
            zbcompile.load_checkpoint(path, model)
            if path != first:
                shutil.rmtree(path)
        assert first.exists()
    raise AssertionError("a save never ended")


def killed(number: int, folder: Path, save: Callable[[], object]) -> bool:
    """Returns whether a process that saves was killed at the `number`th call, or had ended before."""
    child = os.fork()
    if child == 0:
        try:
            with at_call(number, folder, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                save()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, "the save failed"
    return os.WIFSIGNALED(status)


def kill_saves(folder: Path, kills: int, seed: int = 0) -> Counts:
    """Kills at every call of plain and of asynchronous saves in turn. Returns what they left."""
    pipe, counts, newest, number = piped(layers()), Counter[str](), 0, seed
    for step in range(1, kills + 1):
        for parameter in pipe.parameters():
            parameter.data.fill_(step)

        def save(step: int = step) -> None:
            wait, extra = bool(step % 2), {"step": step}
            zbcompile.save_checkpoint(folder, pipe, step=step, extra=extra, keep=KEEP, wait=wait)
            pipe.close()  # waits for the thread

        died = killed(number // 2, folder, save)
        number = number + 1 if died else 0
        counts["kills" if died else "saved"] += 1
        counts["left half a checkpoint"] += any(folder.glob(".step-*"))
        newest = require_nothing_lost(folder, newest if died else step)
    return counts


def require_nothing_lost(folder: Path, committed: int) -> int:
    """The newest step, which is the committed one or a later one; all are whole, with their bits."""
    found = checkpoints_in(folder)
    assert len(found) <= KEEP + 1, found
    steps = [0]
    for path in found:
        zbcompile.verify_checkpoint(path)
        at = zbcompile.load_checkpoint(path, model := layers())
        assert path.name == f"step-{at.step:08d}"
        assert at.extra == {"step": at.step}
        assert all(bool((parameter == at.step).all()) for parameter in model.parameters())
        steps.append(at.step)
    assert steps[-1] >= committed, (steps, committed)
    return steps[-1]


CAMPAIGNS: dict[str, Callable[..., Counts]] = {
    **{"checkpoints": flip_checkpoints, "programs": flip_programs, "edits": edit_programs},
    **{"kills": kill_saves, "pickles": plant_pickles, "disks": fill_disks},
}


def main() -> None:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    for name in (*CAMPAIGNS, "seed"):
        parser.add_argument(f"--{name}", type=int, default=0, metavar="COUNT")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, run in CAMPAIGNS.items():
        if count := getattr(options, name):
            with tempfile.TemporaryDirectory() as folder:
                print(f"{name}: {dict(run(Path(folder), count, options.seed))}", flush=True)


if __name__ == "__main__":
    main()
