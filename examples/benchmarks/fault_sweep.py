"""Breaks everything that can break in a job of several processes, and looks at how each of them ends.

    python examples/benchmarks/fault_sweep.py FILE [--ranks 2 4] [--only TEXT] [--timeout 5]

FILE gets a line of JSON for each cell; a cell that has one is not run
again, so that a sweep can be interrupted. A cell starts the processes of a job and breaks one
thing; it is good if every process that still runs names what was broken, and ends, within `timeout`
+ 5 seconds of the fault. Ranks are forked from this process, which has imported torch; each then
ends as a Python program does.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch
import torch.distributed as dist

import zbcompile
from tests.support.faulty import ACTS, INJECT, Faulty, Order, make, rows
from tests.support.ports import free_port

PATIENCE = 180.0  # seconds for a job to get going
LIMIT = 5.0  # seconds beyond the timeout
INFINITE = float("inf")


@dataclass(frozen=True)
class Fault:
    """`what` breaks while all ranks are in `activity`: on rank `victim` (-1: the last one), or
    elsewhere. The store is kept by the launcher, or by rank 0."""

    what: str
    activity: str = "step"
    victim: int = 0
    store: str = "launcher"

    def __str__(self) -> str:
        where = {0: "rank 0", -1: "last rank"}[self.victim] if self.what in ON_A_RANK else ""
        return (
            f"{self.what} in {self.activity}"
            f" {where}{' (keeps the store)' if self.store == 'rank 0' else ''}".strip()
        )

    def rank(self, ranks: int) -> int:
        return self.victim % ranks


SENT = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
EXITS_AT_ONCE = "exception in F and os._exit"  # as scripts do that fear to hang at their end
PASSES = {EXITS_AT_ONCE: Order("raise", 0, "F", 2)}
PASSES |= {f"exception in {name}": Order("raise", 0, name, 2) for name in "FBW"}
PASSES |= {"endless F": Order("sleep", 0, "F", 2)}
GONE_WITH_THE_STORE = "launcher SIGKILL"
OUTSIDE = ("exception between calls", "early end", "endless code between calls")
SILENT = {*SENT, "never arrives", "early end", "endless F", "endless code between calls"}
ON_A_RANK = (*SENT, *PASSES, *OUTSIDE, "never arrives")
ACTIVITIES = ("step", "eval", "compile", "save", "save in a thread", "load")
FAULTS = (
    *(Fault(what, activity, -1) for what in ("SIGKILL", "SIGSTOP") for activity in ACTIVITIES),
    *(Fault(what, activity, 0) for what in ("SIGKILL", "SIGSTOP") for activity in ACTIVITIES),
    *(
        Fault(what, activity, 0, "rank 0")
        for what in ("SIGKILL", "SIGSTOP")
        for activity in ACTIVITIES
    ),
    Fault(EXITS_AT_ONCE, "step", 0, "rank 0"),
    *(
        Fault(what, "step", victim)
        for what in (*PASSES, *OUTSIDE)
        if what != EXITS_AT_ONCE
        for victim in (0, -1)
    ),
    *(Fault("never arrives", "start", victim) for victim in (0, -1)),
    *(Fault(GONE_WITH_THE_STORE, activity) for activity in ("step", "compile", "save")),
)


@dataclass(frozen=True)
class Job:
    """One process of a job: what it does until it is told, or made, to end."""

    rank: int
    ranks: int
    fault: Fault
    timeout: float
    folder: Path

    def __call__(self) -> None:
        torch.set_num_threads(1)
        if self.fault.what == "never arrives" and self.rank == self.fault.rank(self.ranks):
            time.sleep(3600)
        pipe = make("1f1b", self.timeout if self.fault.activity == "start" else PATIENCE)
        pipe.step(rows(), target=rows())
        pipe._watch.timeout = self.timeout  # type: ignore[union-attr]
        act = self._activity(pipe)
        for number in itertools.count():
            (self.folder / f"at-{self.rank}").write_text(str(number))
            if number == 3:
                self._break()
            try:
                act(number)
            except zbcompile.PipelineError:
                if self.fault.what == EXITS_AT_ONCE:
                    traceback.print_exc()
                    os._exit(1)
                raise

    def _activity(self, pipe: zbcompile.Pipeline) -> Callable[[int], object]:
        # the last of four ranks has no parameters, which torch.optim.SGD itself would refuse
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.01)
        folder = self.folder / "checkpoints"
        if self.fault.activity == "load":
            zbcompile.save_checkpoint(folder, pipe, optimizer)
        acts: dict[str, Callable[[int], object]] = {
            "step": lambda _: pipe.step(rows(), target=rows()),
            "eval": lambda _: pipe.eval(rows()),
            "compile": lambda number: pipe.compile(
                rows(8 + 4 * number), target=rows(8 + 4 * number)
            ),
            "save": lambda _: zbcompile.save_checkpoint(folder, pipe, optimizer, keep=1),
            "save in a thread": lambda _: zbcompile.save_checkpoint(
                folder, pipe, optimizer, keep=1, wait=False
            ),
            "load": lambda _: zbcompile.load_checkpoint(folder, pipe, optimizer),
        }
        return acts[self.fault.activity]

    def _break(self) -> None:
        """What this rank breaks by itself."""
        what = self.fault.what
        if self.rank != self.fault.rank(self.ranks) or what not in (*PASSES, *OUTSIDE):
            return
        (self.folder / "broken").write_text("")
        if what in PASSES:
            order = PASSES[what]
            ACTS["sleep"] = lambda: time.sleep(4 * self.timeout)
            INJECT.order, INJECT.calls = Order(order.what, self.rank, order.pass_, order.call), 0
        elif what == "exception between calls":
            raise ValueError("broken between calls")
        elif what == "early end":
            sys.exit(0)
        else:
            time.sleep(4 * self.timeout)


def keep_store(folder: Path) -> None:
    """The launcher's part: keep the store until killed."""
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    (folder / "port.new").write_text(str(store.port))
    (folder / "port.new").rename(folder / "port")
    time.sleep(3600)


@dataclass
class Cell:
    """A fault at a number of ranks, and how it ended."""

    fault: Fault
    ranks: int
    timeout: float
    folder: Path = Path()  # what its processes say
    pids: dict[str, int] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    broken: float = 0.0

    def start(self) -> Callable[[], None] | None:
        """Fork all processes; in each of them, what it is to do."""
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        if self.fault.store == "launcher":
            if self._fork("launcher"):
                return lambda: keep_store(self.folder)
            wait_for((self.folder / "port").exists)
            port = (self.folder / "port").read_text()
        else:
            port = str(free_port())
        for rank in range(self.ranks):
            if self._fork(str(rank)):
                os.environ |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self.ranks),
                }
                os.environ |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "LOCAL_WORLD_SIZE": str(self.ranks),
                }
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(self.fault.store == "launcher")
                return Job(rank, self.ranks, self.fault, self.timeout, self.folder)
        return None

    def _fork(self, name: str) -> bool:
        """Returns True if this is the new process."""
        pid = os.fork()
        if pid:
            self.pids[name] = pid
            return False
        log = os.open(self.folder / f"log-{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        return True

    def finish(self) -> None:
        """Break it, and wait for all processes that can end."""
        at = self._break()
        self.broken = time.time()
        end = at + self.timeout + LIMIT + 60  # the end of an interpreter may lack a processor
        while len(self.ended) < self.ranks and time.monotonic() < end and not self._only_frozen():
            self._reap(at)
            time.sleep(0.05)
        self.close()

    def _only_frozen(self) -> bool:
        silent = self.fault.what in ("SIGSTOP", "never arrives") and self.fault.rank(self.ranks)
        return silent is not False and set(range(self.ranks)) - self.ended.keys() == {silent}

    def _break(self) -> float:
        """Break what is broken from outside, once all ranks are at work; when it was broken."""
        fault = self.fault
        if fault.activity == "start":
            return time.monotonic()
        if fault.what in (*PASSES, *OUTSIDE):
            wait_for((self.folder / "broken").exists)
            return time.monotonic()
        wait_for(lambda: all(self._at(rank) >= 3 for rank in range(self.ranks)))
        time.sleep(0.1)
        if fault.what == GONE_WITH_THE_STORE:
            os.kill(self.pids["launcher"], signal.SIGKILL)
        else:
            os.kill(self.pids[str(fault.rank(self.ranks))], SENT[fault.what])
        return time.monotonic()

    def _at(self, rank: int) -> int:
        path = self.folder / f"at-{rank}"
        return int(path.read_text() or "0") if path.exists() else -1

    def _reap(self, at: float) -> None:
        for rank in set(range(self.ranks)) - self.ended.keys():
            pid = self.pids[str(rank)]
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.ended[rank] = time.monotonic() - at

    def close(self) -> None:
        """End what is left."""
        for name, pid in self.pids.items():
            if name == "launcher" or int(name) not in self.ended:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def speakers(self) -> Iterator[int]:
        """The ranks that can still say something."""
        what, victim = self.fault.what, self.fault.rank(self.ranks)
        mute = what in SILENT
        return (rank for rank in range(self.ranks) if not (mute and rank == victim))

    def said(self, rank: int) -> str:
        text = (self.folder / f"log-{rank}").read_text(errors="replace")
        matches = re.findall(
            r"^(?!frame|\[W).*(?:failed at|Error:|found no process group).*$", text, re.M
        )
        return matches[-1].strip() if matches else ""

    def spoke_after(self, rank: int) -> float:
        """Seconds from the fault to a rank's last word: what is left is the end of the interpreter,
        which takes the processor 1.4 s to drop all modules."""
        return (self.folder / f"log-{rank}").stat().st_mtime - self.broken

    def blames(self, rank: int) -> bool:
        """Returns True if a rank named what was broken."""
        what, victim, said = self.fault.what, self.fault.rank(self.ranks), self.said(rank)
        if what == GONE_WITH_THE_STORE:
            return "the launcher ended" in said
        if what == "never arrives":
            return "found no process group" in said
        if what.startswith("exception in"):
            return "broken on order" in said
        return rank == victim or f"rank {victim} failed" in said

    @property
    def name(self) -> str:
        return f"{self.fault} | {self.ranks} ranks"

    def result(self) -> dict[str, Any]:
        """A line of the results: seconds from the fault to the last word and to the last end, and
        what was not good."""
        limit, ranks = self.timeout + LIMIT, list(self.speakers())
        spoke, said = (
            {rank: self.spoke_after(rank) for rank in ranks},
            {rank: self.said(rank) for rank in ranks},
        )
        ended = {rank: self.ended.get(rank, INFINITE) for rank in ranks}
        return {
            "cell": self.name,
            "folder": str(self.folder),
            "spoke": round(max(spoke.values()), 1),
            "ended": round(max(ended.values()), 1),
            "silent": [rank for rank in ranks if not said[rank]],
            "wrong": {
                rank: said[rank][:300] for rank in ranks if said[rank] and not self.blames(rank)
            },
            "late to speak": {rank: round(spoke[rank], 1) for rank in ranks if spoke[rank] > limit},
            "late to end": {rank: round(ended[rank], 1) for rank in ranks if ended[rank] > limit},
        }


def wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("the job did not get going")
        time.sleep(0.02)


BAD = ("silent", "wrong", "late to speak", "late to end", "no fault")


def main() -> Callable[[], None] | None:
    """Runs all cells. In a process of a job, returns the work of that process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    options = parser.parse_args()
    Faulty()  # imports what it needs
    gc.freeze()  # spares every process at its end 0.8 s of processor time for what was imported
    faults = random.Random(1).sample(FAULTS, len(FAULTS))
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {json.loads(line)["cell"] for line in lines}
    for fault, ranks in itertools.product(faults, options.ranks):
        cell = Cell(fault, ranks, options.timeout)
        if options.only not in cell.name or cell.name in done:
            continue
        if fault.what == "exception in W" and fault.rank(ranks) == 3:  # which has no parameters
            continue
        if (job := cell.start()) is not None:
            return job
        try:
            cell.finish()
            result = cell.result()
        except TimeoutError as error:
            cell.close()
            result = {"cell": cell.name, "no fault": str(error)}
        bad = {what: result[what] for what in BAD if result.get(what)}
        print(f"{cell.name} | {result.get('ended')} s | {bad or 'good'}", flush=True)
        with options.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return None


if __name__ == "__main__":
    job = main()
    if job is not None:
        job()
