"""Two runs that want to write into one folder of checkpoints, one of which is killed or stopped at random times.

    python -m tests.support.two_runs --trials 50        from the repository's root

A first run saves as fast as it can, every other run in a thread; a second one starts beside it. Then the first one is
killed (the second must take over), or is stopped or writes on for longer than the second waits (which must be refused,
by the first one's name). Runs must never mix: the steps that they say are committed come one run after the other, and
at every stop of the writer all checkpoints in the folder are whole, each with the tensors and `extra` of one step.
"""

import argparse
import os
import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

import zbcompile
from tests.support.killed_saves import KEEP, make_pipe, require_nothing_lost

STEPS = 100_000  # of a run: its steps are numbered from run * STEPS on, which float32 holds exactly
OUTCOMES = ("killed", "killed", "killed", "stopped", "writes on")
STEP = r"^\d+$"
REFUSED = r"is being written by another run: host .*, process (\d+), since"


def save_as(run: int, folder: Path, pipe: Any, said: int) -> None:
    """In a child: save until the end, and say each step that is committed, or why the run ended."""
    try:
        for step in range(run * STEPS, (run + 1) * STEPS):
            for parameter in pipe.parameters():
                parameter.data.fill_(step)
            background = bool(run % 2)
            zbcompile.save_checkpoint(folder, pipe, step=step, extra={"step": step}, keep=KEEP, wait=not background)
            if step > run * STEPS or not background:  # in the background the step before is complete
                os.write(said, f"{run} {step - int(background)}\n".encode())
    except zbcompile.PipelineError as error:
        os.write(said, f"{run} {error}\n".encode())


@dataclass
class Folder:
    """The folder, and what its runs have said."""

    path: Path
    pipe: Any
    said: int
    heard: TextIO
    steps: list[int] = field(default_factory=list)
    children: set[int] = field(default_factory=set)

    def start(self, run: int) -> int:
        child = os.fork()
        if child == 0:
            try:
                save_as(run, self.path, self.pipe, self.said)
            finally:
                os._exit(0)
        self.children.add(child)
        return child

    def end(self, *children: int, kill: bool = True) -> None:
        for child in children:
            os.kill(child, signal.SIGKILL if kill else 0)
            os.waitpid(child, 0)
            self.children.remove(child)

    def wait_for(self, run: int, text: str) -> str:
        """Read on until `run` has said something that matches; nothing but steps of the runs in turn is expected."""
        while True:
            speaker, _, line = self.heard.readline().strip().partition(" ")
            if line.isdecimal():
                assert int(line) // STEPS == int(speaker)
                assert not self.steps or int(line) > self.steps[-1], f"{line} after {self.steps[-1]}: runs are mixed"
                self.steps.append(int(line))
            else:
                assert int(speaker) == run, (speaker, line)
                assert re.search(text, line), line
            if int(speaker) == run and re.search(text, line):
                return line

    def require_unmixed(self, writer: int) -> None:
        with stopped(writer):
            require_nothing_lost(self.path, self.steps[-1])


@contextmanager
def stopped(child: int) -> Iterator[None]:
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    try:
        yield
    finally:
        os.kill(child, signal.SIGCONT)


def two_runs(path: Path, trials: int, seed: int = 0) -> Counter[str]:
    """How many trials ended in which way."""
    chance, outcomes = random.Random(seed), Counter[str]()
    heard, said = os.pipe()
    folder = Folder(path, make_pipe(), said, os.fdopen(heard))
    try:
        writer = folder.start(1)
        folder.wait_for(1, STEP)
        for run in range(2, trials + 2):
            outcome = OUTCOMES[run % len(OUTCOMES)]
            waiting = folder.start(run)
            time.sleep(chance.random() * 2)
            writer = try_second(folder, writer, waiting, run, outcome)
            folder.require_unmixed(writer)
            outcomes[outcome] += 1
    finally:
        folder.end(*tuple(folder.children))
    return outcomes


def try_second(folder: Folder, writer: int, waiting: int, run: int, outcome: str) -> int:
    """The process that holds the folder after the trial of the second run, number `run`."""
    if outcome == "killed":
        folder.end(writer)
        folder.wait_for(run, STEP)
        return waiting
    os.kill(writer, signal.SIGSTOP if outcome == "stopped" else 0)
    holder = re.findall(REFUSED, folder.wait_for(run, REFUSED))
    assert holder == [str(writer)], holder
    os.kill(writer, signal.SIGCONT)
    folder.end(waiting, kill=False)
    return writer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        print(dict(two_runs(Path(path), options.trials, options.seed)), "and no two runs were mixed")


if __name__ == "__main__":
    main()
