"""Runs that are killed with SIGKILL at chosen moments and started again, and what must come out of
them.

    python -m tests.support.killing --moments 50        from the repository's root; prints every kill
    python -m tests.support.killing --moments 50 --phase save --save-async      all kills while checkpoints are written

Ranks are real processes, forked from one that has imported torch, so that a start takes a fraction
of a second.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

RANKS, STEPS, EVERY = 2, 30, 5
PATIENCE = 120.0  # seconds for anything that must happen
PHASES = ("compile", "resume", "step", "save", "one rank")
REHEARSED, PARTS = "tests.support.rehearsed", "tests.support.killing_parts"


@dataclass(frozen=True)
class Kill:
    """When to kill: in which phase, and how late in it, as a share of its usual length. "one rank"
    kills one of the ranks in a step and leaves the others to end by themselves."""

    phase: str
    late: float
    rank: int = 0


@dataclass
class Site:
    """One training run: its program, its checkpoints, what it prints and the weights that it
    leaves."""

    folder: Path
    more: tuple[str, ...] = ()
    data: str = "batches"
    lengths: dict[str, float] = field(
        default_factory=lambda: {"step": 0.05, "save": 0.05, "resume": 1.0, "compile": 3.0}
    )

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def weights(self) -> Path:
        return self.folder / "final.safetensors"

    def arguments(self) -> list[str]:
        return [
            *(
                str(self.folder / "program"),
                "--data",
                f"{PARTS}:{self.data}",
                "--init",
                f"{PARTS}:init",
            ),
            *("--steps", str(STEPS), "--lr", "0.01", "--seed", "3", "--log-every", "1"),
            *(
                "--checkpoint",
                str(self.folder / "checkpoints"),
                "--every",
                str(EVERY),
                "--keep",
                "2",
                "--resume",
            ),
            *("--export", str(self.weights), "--timeout", "60", *self.more),
        ]


class Killed(Exception):
    """The processes were killed as asked."""


def finish(
    site: Site, kills: list[Kill], say: Callable[[str], None] = lambda _: None
) -> list[Kill]:
    """Start the run again after every kill until it is done; the kills that met it alive, in their
    order."""
    met: list[Kill] = []
    waiting = list(kills)
    while not site.weights.exists():
        kill = waiting.pop(0) if waiting else None
        try:
            if kill is not None and kill.phase == "compile":
                compile_program(site, kill)
            else:
                run_compiled(site, kill)
        except Killed:
            assert kill is not None
            met.append(kill)
            say(f"{len(met)}: killed in {kill.phase}; {reached(site)}")
    return met


def run_compiled(site: Site, kill: Kill | None) -> None:
    """As a user would: compile where that is not done, then run."""
    if not compiled(site):
        compile_program(site, None)
    run(site, kill)


def compiled(site: Site) -> bool:
    return (site.folder / "program" / "manifest.json").exists()


def printed(site: Site) -> str:
    return site.log.read_text() if site.log.exists() else ""


def reached(site: Site) -> str:
    return (printed(site).splitlines() or ["nothing was printed"])[-1]


def compile_program(site: Site, kill: Kill | None) -> None:
    """Compile in a process of its own, as the command does."""
    with processes(site, "compile_", [{}]) as started:
        began = time.monotonic()  # the first process waits for the server that forks it
        if kill is not None:
            time.sleep(kill.late * site.lengths["compile"])
            kill_all(started)
        wait_for(started)
        site.lengths["compile"] = time.monotonic() - began


def run(site: Site, kill: Kill | None) -> None:
    """Run all ranks to the end, or to the kill."""
    site.log.unlink(missing_ok=True)
    began, since = time.monotonic(), time.time()
    with processes(site, "train", environments()) as started:
        if kill is None:
            wait_until(lambda: "loss" in printed(site), started)
            site.lengths["resume"] = time.monotonic() - began
            wait_for(started)
            return
        wait_until(lambda: kill.phase == "resume" or moment(site, kill, since), started)
        length = site.lengths["step" if kill.phase == "one rank" else kill.phase]
        time.sleep(kill.late * length)
        if kill.phase == "one rank":
            kill_one(started, kill.rank)
        kill_all(started)


def moment(site: Site, kill: Kill, since: float) -> bool:
    """Whether the phase has begun: some steps after the start, in the first or the second save
    after it."""
    if kill.phase == "save":
        return printed(site).count("sav") >= int(2 * kill.late) and writes(site, since)
    return printed(site).count("loss") > int(8 * kill.late)


def writes(site: Site, since: float) -> bool:
    """Whether a checkpoint is being written; a directory that an earlier kill left does not
    count."""
    with contextlib.suppress(FileNotFoundError):
        return any(
            path.stat().st_mtime > since for path in (site.folder / "checkpoints").glob(".step-*")
        )
    return False


def environments() -> list[dict[str, str]]:
    """What torchrun gives each rank."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]


@contextlib.contextmanager
def processes(site: Site, part: str, given: list[dict[str, str]]) -> Iterator[list[BaseProcess]]:
    """A process per environment; none is left behind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([REHEARSED, PARTS])
    started: list[BaseProcess] = []
    try:
        for environment in given:
            started.append(context.Process(target=start, args=(part, site, environment)))
            started[-1].start()
        yield started
    except AssertionError as error:
        error.add_note(site.log.read_text()[-3000:])
        raise
    finally:
        for process in started:
            process.kill()
            process.join()


def start(part: str, site: Site, environment: dict[str, str]) -> None:
    """In the new process."""
    assert {
        REHEARSED,
        PARTS,
    } <= sys.modules.keys(), "the forkserver could not import what it shares"
    os.environ.update(environment)
    with (
        site.log.open("a") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        parts: Any = __import__(PARTS, fromlist=[part])
        status = getattr(parts, part)(site.folder, site.arguments())
    sys.exit(status)


def wait_until(begun: Callable[[], bool], started: list[BaseProcess]) -> None:
    """Until the phase has begun, or all processes have ended (the run was done before)."""
    deadline = time.monotonic() + PATIENCE
    while not begun() and any(process.is_alive() for process in started):
        assert time.monotonic() < deadline, "the run went no further"
        time.sleep(0.005)


def wait_for(started: list[BaseProcess]) -> None:
    for process in started:
        process.join(PATIENCE)
    codes = [process.exitcode for process in started]
    assert codes == [0] * len(started), codes


def kill_all(started: list[BaseProcess]) -> None:
    """Kill what still lives; `Killed` if that was anything. A process that ended by itself must
    have ended well."""
    alive = [process for process in started if process.is_alive()]
    for process in alive:
        process.kill()
    for process in started:
        process.join(PATIENCE)
    if alive:
        raise Killed
    assert all(process.exitcode == 0 for process in started), [
        process.exitcode for process in started
    ]


def kill_one(started: list[BaseProcess], rank: int) -> None:
    """Kill one rank; the others must notice and end by themselves, with an error."""
    if not started[rank].is_alive():
        return
    started[rank].kill()
    for process in started:
        process.join(PATIENCE)
    codes = [process.exitcode for process in started]
    assert codes[rank] == -signal.SIGKILL, codes
    assert all(code == 2 for other, code in enumerate(codes) if other != rank), codes
    raise Killed


def random_kills(count: int, seed: int, phases: Sequence[str] = PHASES) -> list[Kill]:
    """Moments in the phases, in turn, each somewhere in its phase."""
    chance = random.Random(seed)
    return [
        Kill(phases[i % len(phases)], chance.random(), chance.randrange(RANKS))
        for i in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Kill runs at random moments; all must end with the same weights."
    )
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phase", choices=PHASES, nargs="+", default=PHASES)
    parser.add_argument(
        "--save-async", action="store_true", help="checkpoints are written in a thread"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        more = ("--save-async",) if options.save_async else ()
        undisturbed = Site(Path(folder) / "undisturbed", more)
        undisturbed.folder.mkdir()
        finish(undisturbed, [])
        kills, done, number = random_kills(options.moments, options.seed, options.phase), 0, 0
        while done < options.moments:
            site = Site(Path(folder) / f"run-{number}", more, lengths=dict(undisturbed.lengths))
            site.folder.mkdir()
            met = finish(site, kills[done : done + len(PHASES)], print)
            same = site.weights.read_bytes() == undisturbed.weights.read_bytes()
            done, number = done + max(1, len(met)), number + 1
            print(
                f"run {number}: {len(met)} kills, weights {'bitwise equal' if same else 'DIFFER'}",
                flush=True,
            )
            if not same:
                raise SystemExit(1)
        print(
            f"{done} kills in {number} runs: every restart went on, all weights are bitwise equal"
        )


if __name__ == "__main__":
    main()
