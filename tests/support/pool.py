"""A pool of worker processes that take the part of ranks.

Starting a process and importing torch takes seconds; a process group takes milliseconds. So the workers are started
once, when first needed, and each task runs on the first 1, 2 or 4 of them, with a process group of exactly that size
as WORLD, as under torchrun. A task is a function of a module, found by its import path, with arguments that pickle.
"""

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

DIED = "Died"
READY = b"ready"  # a worker's first message, when its imports are done
START = 200.0  # seconds within which it must come
GRACE = 15.0  # seconds that the other ranks have once one has failed: an error must reach all of them


class TaskFailed(Exception):
    """A task raised on some rank, or did not end in time; the text holds every rank's traceback or stack."""


@dataclass(frozen=True)
class Outcome:
    """What one rank did: `value`, or the exception that it raised (`error`: its type's name, `text`: its message)."""

    value: Any = None
    error: str | None = None
    text: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Task:
    """One rank's part: the function `path` ("module:name") in the process group that meets in the file `store`."""

    path: str
    args: tuple[Any, ...]
    rank: int
    ranks: int
    store: str


@dataclass
class Worker:
    """A process with the pipe to it and the file where it writes its stacks when asked."""

    process: BaseProcess
    pipe: Connection
    stacks: Path


@dataclass
class Pool:
    """`run` a function on all ranks of a group and get every rank's result."""

    folder: Path
    workers: list[Worker] = field(default_factory=list)
    group: tuple[int, str] | None = None
    groups: int = 0

    def run(self, function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 120) -> list[Any]:
        """The result of `function(*args)` on every rank; TaskFailed, with all tracebacks, if one of them raised."""
        outcomes = self.outcomes(function, *args, ranks=ranks, timeout=timeout)
        if any(outcome.error for outcome in outcomes):
            raise TaskFailed("\n".join(f"rank {rank}: {o.trace or 'fine'}" for rank, o in enumerate(outcomes)))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 120) -> list[Outcome]:
        """As `run`, but a rank's exception is an outcome. TaskFailed, with all stacks, if a rank does not end."""
        self._start(ranks)
        path = f"{function.__module__}:{function.__qualname__}"
        store = self._store(ranks)
        for rank in range(ranks):
            self.workers[rank].pipe.send_bytes(pickle.dumps(Task(path, args, rank, ranks, store)))
        outcomes = self._collect(ranks, timeout)
        if any(outcome.error for outcome in outcomes):
            self.group = None  # it may hold messages that nobody took: the next task gets a new one
        if any(outcome.error == DIED for outcome in outcomes):
            self.close(patience=0)
        return outcomes

    def close(self, patience: float = 5) -> None:
        """End the workers: a closed pipe asks them to, and what is busy is killed after `patience` seconds."""
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join(patience)
            worker.process.kill()
        self.workers.clear()
        self.group = None

    def _start(self, ranks: int) -> None:
        """Start the workers that are missing. Their imports take long on a busy machine and count for no time-out."""
        new = [_start_worker(self.folder / f"stacks-{index}") for index in range(len(self.workers), ranks)]
        self.workers.extend(new)
        for worker in new:
            if not worker.pipe.poll(START) or worker.pipe.recv_bytes() != READY:
                raise TaskFailed(f"a worker did not start within {START:.0f} s")

    def _store(self, ranks: int) -> str:
        """The file where the group meets: the same one for as long as its size stays and it is healthy."""
        if self.group is None or self.group[0] != ranks:
            self.groups += 1
            self.group = (ranks, str(self.folder / f"group-{self.groups}"))
        return self.group[1]

    def _collect(self, ranks: int, timeout: float) -> list[Outcome]:
        pipes = {self.workers[rank].pipe: rank for rank in range(ranks)}
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(found) < ranks:
            ready = wait([p for p, rank in pipes.items() if rank not in found], max(0, deadline - time.monotonic()))
            if not ready:
                raise TaskFailed(self._give_up(found, ranks))
            for pipe in ready:
                found[pipes[pipe]] = _receive(pipe)  # type: ignore[index]
            if any(outcome.error for outcome in found.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        return [found[rank] for rank in range(ranks)]

    def _give_up(self, found: dict[int, Outcome], ranks: int) -> str:
        """Ask the ranks that hang for their stacks, end all workers, and say where everyone was."""
        hanging = [rank for rank in range(ranks) if rank not in found]
        for rank in hanging:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[rank].process.pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        texts = {rank: outcome.trace or "fine" for rank, outcome in found.items()}
        texts |= {rank: f"still running:\n{self.workers[rank].stacks.read_text()}" for rank in hanging}
        self.close(patience=0)
        return f"ranks {hanging} did not end in time\n" + "\n".join(f"rank {r}: {texts[r]}" for r in range(ranks))


@contextlib.contextmanager
def open_pool() -> Iterator[Pool]:
    """A pool whose workers start with its first task and end with the block."""
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(Path(folder))
        try:
            yield pool
        finally:
            pool.close()


def _start_worker(stacks: Path) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, str(stacks)), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours, stacks)


def _receive(pipe: Connection) -> Outcome:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return Outcome(error=DIED, text="the process ended", trace="the process ended in the middle of the task")


def serve(pipe: Connection, stacks: str) -> None:
    """A worker's life: take a task, run it, answer."""
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin by ignoring it
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)  # sums and norms change their bits with the number of threads
        importlib.import_module("zbcompile").pipeline  # noqa: B018  imports the runtime
        gc.freeze()  # what is imported stays: no collection need walk through it
        shared = importlib.import_module("tests.support.shared_captures").shared_captures()
        pipe.send_bytes(READY)
        group = ""
        with shared, contextlib.suppress(EOFError):
            while True:
                task: Task = pickle.loads(pipe.recv_bytes())
                outcome = _attempt(task, group)
                group = task.store
                pipe.send_bytes(pickle.dumps(outcome))


def _attempt(task: Task, group: str) -> Outcome:
    try:
        if task.store != group:
            _join(task)
        module, _, name = task.path.partition(":")
        return Outcome(value=getattr(importlib.import_module(module), name)(*task.args))
    except Exception as error:
        return Outcome(None, type(error).__name__, str(error), traceback.format_exc())


def _join(task: Task) -> None:
    """Become a rank of the task's group."""
    dist = importlib.import_module("torch.distributed")
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{task.store}", rank=task.rank, world_size=task.ranks)
