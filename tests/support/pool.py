"""A pool of worker processes that take the part of ranks.

Starting a process and importing torch takes seconds; a process group takes milliseconds. So one
process, the nursery, imports what there is to import, and workers are forked from it when first
needed. Each task runs on the first 1, 2 or 4 of them, with a process group of exactly that size as
WORLD, as under torchrun. A task is a function of a module, found by its import path, with arguments
that pickle.
"""

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

DIED = "Died"
START = 200.0  # seconds within which the nursery must have done its imports, or a rehearsal
# Elsewhere torch does not survive it, and CUDA itself does not: then every worker imports for
# itself.
FORKS = sys.platform == "linux" and version("torch").endswith("+cpu")
# With a device beside the CPU autograd has threads from the first backward on, which a fork would
# not have.
STAYS_SINGLE = "PRETENDED_GPU" in os.environ
MUCH = 200  # modules; importing so many takes a second
# seconds that the other ranks have once one has failed: an error must reach all of them
GRACE = 15.0


class TaskFailed(Exception):
    """A task raised on some rank, or did not end in time; the text holds every rank's traceback or
    stack."""


@dataclass(frozen=True)
class Outcome:
    """What one rank did: `value`, or the exception that it raised (`error`: its type's name,
    `text`: its message)."""

    value: Any = None
    error: str | None = None
    text: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Task:
    """One rank's part: the function `path` ("module:name") in the process group that meets in the
    file `store`."""

    path: str
    args: tuple[Any, ...]
    rank: int
    ranks: int
    store: str
    backend: str = "gloo"


@dataclass(frozen=True)
class Start:
    """The order to start a worker that will run functions of `module`, and that writes its stacks
    to a file."""

    module: str
    stacks: str


@dataclass
class Worker:
    """A process with the pipe to it and the file where it writes its stacks when asked."""

    pid: int
    pipe: Connection
    stacks: Path


@dataclass
class Nursery:
    """The process that workers are forked from: what takes its orders and answers them, and what
    hands out pipes."""

    process: BaseProcess
    orders: Connection
    pipes: socket.socket

    def ask(self, order: Task | Start) -> Outcome:
        self.orders.send_bytes(pickle.dumps(order))
        if not self.orders.poll(START):
            raise TaskFailed(f"the nursery of the workers did not answer within {START:.0f} s")
        return _receive(self.orders)

    def start(self, module: str, stacks: Path) -> Worker:
        pid = self.ask(Start(module, str(stacks))).value
        (pipe,) = socket.recv_fds(self.pipes, 1, 1)[1]
        return Worker(pid, Connection(pipe), stacks)


@dataclass
class Pool:
    """`run` a function on all ranks of a group and get every rank's result."""

    folder: Path
    workers: list[Worker] = field(default_factory=list)
    group: tuple[int, str, str] | None = None
    groups: int = 0
    nursery: Nursery | None = None
    rehearsed: set[str] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)

    def alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of `function(*args)` in one process without a group. Raises TaskFailed, with
        the traceback, if it raises."""
        if not FORKS:
            return function(*args)
        outcome = self._nursery().ask(Task(_path(function), args, 0, 0, ""))
        if outcome.error:
            raise TaskFailed(f"alone: {outcome.trace}")
        return outcome.value

    def rehearse(self, function: Callable[..., Any], *args: Any) -> None:
        """`alone` for the sake of workers that are forked later, which have imported what it
        imports; once."""
        if FORKS and f"{_path(function)} {args}" not in self.rehearsed:
            self.alone(function, *args)
            self.rehearsed.add(f"{_path(function)} {args}")
            self._end_workers(patience=5)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 2,
        timeout: float = 120,
        backend: str = "gloo",
    ) -> list[Any]:
        """The result of `function(*args)` on every rank; TaskFailed, with all tracebacks, if one of
        them raised. `backend` is that of the group: with "nccl" every rank has a GPU, with "nccl,
        bound" a group bound to it.
        """
        outcomes = self.outcomes(function, *args, ranks=ranks, timeout=timeout, backend=backend)
        if any(outcome.error for outcome in outcomes):
            # The messages first: a log that is cut short keeps them.
            short = [
                f"rank {rank}: {o.error}: {o.text}" for rank, o in enumerate(outcomes) if o.error
            ]
            raise TaskFailed(
                "\n".join(
                    [*short, *(f"rank {r}: {o.trace or 'fine'}" for r, o in enumerate(outcomes))]
                )
            )
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 2,
        timeout: float = 120,
        backend: str = "gloo",
    ) -> list[Outcome]:
        """Like `run`, but a rank's exception is an outcome. TaskFailed, with all stacks, if a rank
        does not end."""
        path = _path(function)
        self._import(function.__module__)
        self._start(ranks, function.__module__)
        store = self._store(ranks, backend)
        for rank in range(ranks):
            self.workers[rank].pipe.send_bytes(
                pickle.dumps(Task(path, args, rank, ranks, store, backend))
            )
        outcomes = self._collect(ranks, timeout)
        if any(outcome.error for outcome in outcomes):
            self.group = None  # it may hold messages that nobody took: the next task gets a new one
        if any(outcome.error == DIED for outcome in outcomes):
            self._end_workers(patience=0)
        return outcomes

    def close(self, patience: float = 5) -> None:
        """End the workers, and the nursery with them."""
        self._end_workers(patience)
        if self.nursery is not None:
            self.nursery.orders.close()
            self.nursery.process.join(patience)
            self.nursery.process.kill()
            self.nursery = None
            self.rehearsed.clear()
            self.imported.clear()

    def _end_workers(self, patience: float) -> None:
        """An empty message asks them to end; what is busy is killed after `patience` seconds."""
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(b"")
        for worker in self.workers:
            if not worker.pipe.poll(patience):  # it closes its side when it ends
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
            worker.pipe.close()
        self.workers.clear()
        self.group = None

    def _nursery(self) -> Nursery:
        if self.nursery is None:
            self.nursery = _start_nursery()
        return self.nursery

    def _import(self, module: str) -> None:
        """What imports much is imported by the nursery, and workers are forked anew: each would
        take as long."""
        if FORKS and module not in self.imported:
            self.imported.add(module)
            if self.workers and self.alone(import_module, module) > MUCH:
                self._end_workers(patience=5)

    def _start(self, ranks: int, module: str) -> None:
        """Start the workers that are missing. Imports take long on a busy machine and count for no
        time-out."""
        for index in range(len(self.workers), ranks):
            self.workers.append(self._nursery().start(module, self.folder / f"stacks-{index}"))

    def _store(self, ranks: int, backend: str) -> str:
        """The file where the group meets: the same one for as long as its size stays and it is
        healthy."""
        if self.group is None or self.group[:2] != (ranks, backend):
            self.groups += 1
            self.group = (ranks, backend, str(self.folder / f"group-{self.groups}"))
        return self.group[2]

    def _collect(self, ranks: int, timeout: float) -> list[Outcome]:
        pipes = {self.workers[rank].pipe: rank for rank in range(ranks)}
        result: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(result) < ranks:
            ready = wait(
                [p for p, rank in pipes.items() if rank not in result],
                max(0, deadline - time.monotonic()),
            )
            if not ready:
                raise TaskFailed(self._give_up(result, ranks))
            for pipe in ready:
                result[pipes[pipe]] = _receive(pipe)  # type: ignore[index]
            if any(outcome.error for outcome in result.values()):
                deadline = min(deadline, time.monotonic() + GRACE)
        return [result[rank] for rank in range(ranks)]

    def _give_up(self, found: dict[int, Outcome], ranks: int) -> str:
        """Ask the ranks that hang for their stacks, end all workers, and say where everyone was."""
        hanging = [rank for rank in range(ranks) if rank not in found]
        for rank in hanging:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        texts = {rank: outcome.trace or "fine" for rank, outcome in found.items()}
        texts |= {
            rank: f"still running:\n{self.workers[rank].stacks.read_text()}" for rank in hanging
        }
        self._end_workers(patience=0)
        return f"ranks {hanging} did not end in time\n" + "\n".join(
            f"rank {r}: {texts[r]}" for r in range(ranks)
        )


@contextlib.contextmanager
def open_pool() -> Iterator[Pool]:
    """A pool whose workers start with its first task and end with the block."""
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(Path(folder))
        try:
            yield pool
        finally:
            pool.close()


def import_module(name: str) -> int:
    """Import a module; how many others came with it."""
    before = len(sys.modules)
    importlib.import_module(name)
    return len(sys.modules) - before


def _path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _start_nursery() -> Nursery:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    pipes, inputs = socket.socketpair()
    process = context.Process(
        target=nurse, args=(theirs, inputs), daemon=FORKS
    )  # a daemon may fork, but not spawn
    process.start()
    theirs.close()
    inputs.close()
    return Nursery(process, ours, pipes)


def _receive(pipe: Connection) -> Outcome:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return Outcome(
            error=DIED,
            text="the process ended",
            trace="the process ended in the middle of the task",
        )


def nurse(orders: Connection, pipes: socket.socket) -> None:
    """The nursery's life: rehearse, or start a worker."""
    with prepared(), contextlib.suppress(EOFError):
        training = importlib.import_module("tests.support.training")
        if FORKS:
            first = training.Case("mlp", "1f1b", 1, 1, steps=1)
            _rehearsed(
                Task("tests.support.training:pipelined", (first,), 0, 0, "")
            )  # torch then imports much
        while True:
            order: Task | Start = pickle.loads(orders.recv_bytes())
            if isinstance(order, Start):
                orders.send_bytes(pickle.dumps(Outcome(_start_worker(order, orders, pipes))))
            else:
                orders.send_bytes(pickle.dumps(_rehearsed(order)))
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _rehearsed(task: Task) -> Outcome:
    """The outcome of a task in the nursery, which then has imported what it imports. If the nursery
    must stay without threads, a child does the task, and the nursery only imports the same modules.
    """
    if not STAYS_SINGLE:
        return _attempt(task, task.store)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    if not os.fork():
        before = set(sys.modules)
        outcome = _attempt(task, task.store)
        theirs.send_bytes(
            pickle.dumps((outcome, [name for name in sys.modules if name not in before]))
        )
        os._exit(0)
    theirs.close()
    try:
        outcome, imported = pickle.loads(ours.recv_bytes())
    except EOFError:
        return Outcome(
            error=DIED,
            text="the process ended",
            trace="the process ended in the middle of the task",
        )
    for name in imported:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return outcome


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Context in which every worker has imported what it needs."""
    gc.set_threshold(50_000, 20, 20)  # see `tests/conftest.py`
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)  # sums and norms change their bits with the number of threads
    importlib.import_module("zbcompile").pipeline  # noqa: B018  imports the runtime
    yield


def _start_worker(order: Start, orders: Connection, pipes: socket.socket) -> int:
    """The number of a new process; its pipe goes to the pool."""
    importlib.import_module(order.module)
    gc.collect()
    gc.freeze()  # what is there stays: no collection need walk through it
    ours, theirs = socket.socketpair()
    if FORKS:
        pid = os.fork()
        if not pid:
            for second in (orders, pipes, ours):
                second.close()
            _live(theirs, order.stacks)
    else:
        process = multiprocessing.get_context("spawn").Process(
            target=begin, args=(theirs, order.stacks)
        )
        process.start()
        pid = process.pid or 0
    socket.send_fds(pipes, [b"!"], [ours.fileno()])
    ours.close()
    theirs.close()
    return pid


def _live(pipe: socket.socket, stacks: str) -> None:
    try:
        serve(Connection(pipe.detach()), stacks)
    finally:
        os._exit(0)  # what was begun before the fork is not this process's to end


def begin(pipe: socket.socket, stacks: str) -> None:
    """A worker that was not forked."""
    with prepared():
        serve(Connection(pipe.detach()), stacks)


def serve(pipe: Connection, stacks: str) -> None:
    """A worker's life: take a task, run it, answer."""
    random.seed()  # no two alike
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a shell's background jobs begin by ignoring it
        group = ""
        with contextlib.suppress(EOFError):
            while order := pipe.recv_bytes():
                task: Task = pickle.loads(order)
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
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    if dist.is_initialized():
        dist.destroy_process_group()
    backend, _, bound = task.backend.partition(", ")
    device = None
    if backend == "nccl":
        torch.cuda.set_device(task.rank)
        device = torch.device("cuda", task.rank) if bound else None
    place = {"init_method": f"file://{task.store}", "rank": task.rank, "world_size": task.ranks}
    dist.init_process_group(backend, device_id=device, **place)
