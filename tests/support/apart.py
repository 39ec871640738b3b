"""Functions in processes of their own, forked from this one: one alone, or two that are the ranks
of a group."""

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 60  # seconds
Running = tuple[BaseProcess, Connection]


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns; None if it did not end in time, or ended the process."""
    return _ended(_begun(function, *args))


def on_two_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(*args, rank)` returns on both ranks of a group over gloo, each as of
    `apart`."""
    with tempfile.TemporaryDirectory() as folder:
        both = [
            _begun(_as_rank, f"file://{folder}/store", function, *args, rank) for rank in range(2)
        ]
        return [_ended(each) for each in both]


def _begun(function: Callable[..., Any], *args: Any) -> Running:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def answer(to: Connection) -> None:
        torch.set_num_threads(1)
        to.send(function(*args))

    process = context.Process(target=answer, args=(theirs,))
    process.start()
    theirs.close()
    return process, ours


def _ended(running: Running) -> Any:
    process, ours = running
    try:
        return ours.recv() if ours.poll(PATIENCE) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def _as_rank(store: str, function: Callable[..., Any], *args: Any) -> Any:
    dist.init_process_group("gloo", init_method=store, rank=args[-1], world_size=2)
    return function(*args)
