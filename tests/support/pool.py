"""A pool of worker processes that take the part of ranks.

On Linux without a GPU the ranks of every task are forked from this process: they have imported and
compiled what it has. CUDA does not survive a fork; there workers come from a process
that has only imported, and stay. A task
is a function with arguments, run in a process group of exactly as many ranks, as under torchrun.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DIED = "Died"
# A device beside the CPU gives autograd threads, which a fork would not have.
FORKS = sys.platform == "linux" and not torch.cuda.is_available()
START = "fork" if FORKS else "forkserver" if sys.platform == "linux" else "spawn"
GRACE = 15.0  # seconds that the other ranks have once one has failed: an error must reach all


class TaskFailed(Exception):
    """A task raised on some rank, or did not end in time; with every rank's traceback or stack."""


@dataclass(frozen=True)
class Outcome:
    """What one rank did: `value`, or the exception that it raised (`error`: its type's name,
    `text`: its message)."""

    value: Any = None
    error: str | None = None
    text: str = ""
    trace: str = "fine"


ENDED = Outcome(error=DIED, text="the process ended", trace="the process ended during the task")


@dataclass
class Worker:
    """A process, the pipe to it, and the file where it writes its stacks when asked."""

    process: BaseProcess
    pipe: Connection
    stacks: Path

    def receive(self) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return ENDED
        return outcome

    def end(self, patience: float) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"")
        self.process.join(patience)
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class Pool:
    """`run` a function on all ranks of a group and get every rank's result."""

    folder: Path
    workers: list[Worker] = field(default_factory=list)
    tasks: int = 0

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """The result of `function(*args)` on every rank. Takes the options of `outcomes`; raises
        TaskFailed, with all tracebacks, if a rank raised."""
        return _values(self.outcomes(function, *args, **options))

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 2,
        timeout: float = 120,
        backend: str = "gloo",
    ) -> list[Outcome]:
        """The outcome of `function(*args)` on every rank. Raises TaskFailed, with all stacks, if a
        rank does not end. `backend` is that of the group: with "nccl" every rank has a GPU, with
        "nccl, bound" a group bound to it."""
        self._start(ranks)
        self.tasks += 1
        for rank in range(ranks):
            place = (rank, ranks, str(self.folder / f"group-{self.tasks}"), backend)
            order = pickle.dumps((partial(function, *args), place))  # pipe.send shares tensors
            self.workers[rank].pipe.send_bytes(order)
        return self._outcomes(ranks, timeout)

    def close(self, patience: float = 5) -> None:
        """End the workers; what is busy is killed after `patience` seconds."""
        for worker in self.workers:
            worker.end(patience)
        self.workers.clear()

    def _start(self, ranks: int) -> None:
        """Start the workers that are missing: forks are new for every task."""
        if FORKS:
            self.close(patience=0)
            gc.collect()
        context = multiprocessing.get_context(START)
        context.set_forkserver_preload(["zbcompile.compiler.compile_model", "torch._dynamo"])
        for index in range(len(self.workers), ranks):
            ours, theirs = context.Pipe()
            stacks = self.folder / f"stacks-{index}"
            process = context.Process(target=_live, args=(theirs, stacks), daemon=FORKS)
            process.start()
            theirs.close()
            self.workers.append(Worker(process, ours, stacks))

    def _outcomes(self, ranks: int, timeout: float) -> list[Outcome]:
        running = {self.workers[rank].pipe: rank for rank in range(ranks)}
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while running:
            ready = wait(list(running), max(0, deadline - time.monotonic()))
            if not ready:
                raise TaskFailed(self._give_up(found, list(running.values())))
            for pipe in ready:
                rank = running.pop(pipe)  # type: ignore[arg-type]
                found[rank] = self.workers[rank].receive()
                if found[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE)
        outcomes = [found[rank] for rank in range(ranks)]
        if ENDED in outcomes:
            self.close(patience=0)
        return outcomes

    def _give_up(self, found: dict[int, Outcome], hanging: list[int]) -> str:
        """Ask the ranks that hang for their stacks, end all workers, and say where everyone was."""
        for rank in hanging:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.workers[rank].process.pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        texts = {rank: outcome.trace for rank, outcome in found.items()}
        for rank in hanging:
            texts[rank] = f"still running:\n{self.workers[rank].stacks.read_text()}"
        self.close(patience=0)
        stacks = [f"rank {rank}: {texts[rank]}" for rank in sorted(texts)]
        return "\n".join([f"ranks {hanging} did not end in time", *stacks])


@contextlib.contextmanager
def open_pool() -> Iterator[Pool]:
    """A pool whose workers start with its first task and end with the block."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Pool(Path(folder))) as pool:
        yield pool


def _values(outcomes: list[Outcome]) -> list[Any]:
    failed = [f"rank {i}: {o.error}: {o.text}" for i, o in enumerate(outcomes) if o.error]
    if failed:  # the messages first: a log that is cut short keeps them
        traces = [f"rank {i}: {o.trace}" for i, o in enumerate(outcomes)]
        raise TaskFailed("\n".join([*failed, *traces]))
    return [outcome.value for outcome in outcomes]


def _live(pipe: Connection, stacks: Path) -> None:
    """A worker's life: take a task, run it, answer."""
    gc.freeze()  # what is there stays: no collection need walk through it
    random.seed()  # no two alike
    torch.set_num_threads(1)  # sums and norms change their bits with the number of threads
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(stacks, "w") as file, contextlib.suppress(EOFError):
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while order := pipe.recv_bytes():
            pipe.send_bytes(pickle.dumps(_attempt(*pickle.loads(order))))


def _attempt(task: Callable[[], Any], place: tuple[int, int, str, str]) -> Outcome:
    try:
        _join(*place)
        return Outcome(task())
    except Exception as error:
        return Outcome(None, type(error).__name__, str(error), traceback.format_exc())


def _join(rank: int, ranks: int, store: str, backend: str) -> None:
    """Become a rank of the task's group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    backend, _, bound = backend.partition(", ")
    device = None
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank) if bound else None
    method = f"file://{store}"
    dist.init_process_group(
        backend, init_method=method, rank=rank, world_size=ranks, device_id=device
    )
