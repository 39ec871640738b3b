"""The doctor command: check a machine, or under torchrun a cluster, before a run."""

import argparse
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from zbcompile.cli.command_line import Command, ranks_for
from zbcompile.distributed.agreement import from_first, gathered, together
from zbcompile.distributed.interfaces import VARIABLE, interface_towards, interfaces
from zbcompile.distributed.link_speed import MeasuredLink, measure_pairs
from zbcompile.distributed.ranks import Ranks
from zbcompile.env import VARIABLES
from zbcompile.errors import PipelineError
from zbcompile.passes import gpu
from zbcompile.progress import Say
from zbcompile.safe_files import cannot_write
from zbcompile.version import __version__

SAMPLE = 32 << 20  # bytes written to measure a disk
CLOCKS = 1.0  # seconds that clocks may differ before logs of two machines cannot be compared
SLOW = 4  # times slower than the usual connection: worth a line


@dataclass(frozen=True)
class MachineReport:
    """One rank's machine. `written`: bytes per second written to the folder's disk; `sees`: whether the folder has the
    first rank's file."""

    host: str
    versions: str
    cores: int
    threads: int
    local_ranks: int
    interface: str
    addresses: dict[str, str]
    devices: list[str] = field(default_factory=list)
    free: int | None = None
    written: float | None = None
    sees: bool = True


def report_here(folder: Path | None, mark: str) -> MachineReport:
    """This rank's report; `mark` names the first rank's file in `folder`. Raises PipelineError if it cannot write."""
    towards = os.environ.get(VARIABLE) or interface_towards(os.environ.get("MASTER_ADDR", "localhost")) or "lo"
    return MachineReport(
        host=socket.gethostname(),
        versions=f"zbcompile {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        interface=towards,
        addresses=interfaces(),
        devices=gpu.device_names(),
        sees=folder is None or (folder / mark).exists(),
        free=None if folder is None else shutil.disk_usage(folder).free,
        written=None if folder is None else _write_speed(folder),
    )


def _write_speed(folder: Path) -> float:
    path = folder / f".doctor-{socket.gethostname()}-{os.getpid()}"
    began = time.perf_counter()
    try:
        with path.open("wb") as file:
            file.write(bytes(SAMPLE))
            file.flush()
            os.fsync(file.fileno())
        return SAMPLE / (time.perf_counter() - began)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        path.unlink(missing_ok=True)


def lines_of(reports: Sequence[MachineReport], pairs: Sequence[MeasuredLink]) -> Iterator[str]:
    """The reports for a reader."""
    for rank, each in enumerate(reports):
        address = each.addresses.get(each.interface, "no IPv4 address")
        yield f"rank {rank}: {each.host}, {each.interface} ({address}); {each.versions}"
        others = ", ".join(f"{name} {own}" for name, own in each.addresses.items() if name != each.interface)
        yield f"  {each.cores} cores, {each.local_ranks} ranks of {each.threads} threads; also {others or 'nothing'}"
        if each.devices:
            yield f"  {', '.join(each.devices)}"
        if each.free is not None and each.written is not None:
            yield f"  folder: {each.free / 2**30:.1f} GiB free, written at {each.written / 2**20:.0f} MiB/s"
    for pair in pairs:
        times = f"{pair.latency * 1e3:.3f} ms, {pair.bandwidth / 2**20:.0f} MiB/s"
        yield f"ranks {pair.first} and {pair.second}: {times}, clocks {pair.ahead * 1e3:+.1f} ms"


def problems_of(reports: Sequence[MachineReport], pairs: Sequence[MeasuredLink], folder: Path | None) -> Iterator[str]:
    """The problems that a run would meet, and what would make it slow."""
    first = reports[0]
    for rank, each in enumerate(reports):
        if each.versions != first.versions:
            yield f"rank {rank} has {each.versions}, rank 0 has {first.versions}. Install the same on every machine."
        if each.threads != first.threads:
            yield f"rank {rank} has {each.threads} threads, rank 0 has {first.threads}. Set OMP_NUM_THREADS alike."
        if each.threads * each.local_ranks > each.cores:
            fitting = each.cores // each.local_ranks
            remedy = f"Set OMP_NUM_THREADS={fitting}" if fitting else f"Start {each.cores} ranks there"
            yield (
                f"rank {rank}: {each.local_ranks} ranks of {each.threads} threads share {each.cores} cores of "
                f"{each.host}. {remedy}."
            )
        if not each.sees:
            yield f"rank {rank} ({each.host}) does not see what rank 0 wrote to {folder}. Name a shared folder."
    usual = median([pair.bandwidth for pair in pairs]) if pairs else 0.0
    for pair in pairs:
        name = f"ranks {pair.first} and {pair.second}"
        if abs(pair.ahead) > CLOCKS:
            yield f"{name}: their clocks differ by {abs(pair.ahead):.1f} s. Synchronise them (NTP)."
        if pair.bandwidth * SLOW < usual:
            yield f"{name}: {pair.bandwidth / 2**20:.0f} MiB/s, where {usual / 2**20:.0f} is usual here."


MARK = ".doctor"  # the first rank's file in the folder
EXAMPLES = """examples:
  python -m zbcompile.doctor --checkpoint checkpoints
  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m zbcompile.doctor
It prints each rank's interfaces, versions, threads and disk, and of every two ranks latency, bandwidth and how far
their clocks differ; then what is wrong.
"""


def _run(chosen: argparse.Namespace, say: Say) -> None:
    say("waiting for all ranks, then measuring their connections")
    if chosen.env:
        print("\n".join(map(str, VARIABLES)))
    with ranks_for("checking the cluster", lambda: torch.device("cpu"), chosen.timeout) as ranks:
        problems = _examine(ranks, chosen.checkpoint)
    if problems and ranks.is_first:
        print("\n".join(f"PROBLEM: {each}" for each in problems), flush=True)
        raise PipelineError(f"{len(problems)} problems, listed on standard output.")


def _examine(ranks: Ranks, folder: Path | None) -> list[str]:
    """Print what all ranks report; what is wrong with it."""
    from_first(ranks, f"writing to {folder}", lambda: _leave_mark(folder))
    reports = gathered(ranks, together(ranks, "checking a machine", lambda: report_here(folder, MARK)))
    pairs = measure_pairs(ranks)
    if ranks.is_first:
        if folder is not None:
            (folder / MARK).unlink(missing_ok=True)
        print("\n".join(lines_of(reports, pairs)), flush=True)
    return list(problems_of(reports, pairs, folder))


def _leave_mark(folder: Path | None) -> bool:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
    return True


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="also check the disk of this shared folder")
    parser.add_argument("--env", action="store_true", help="also list zbcompile's environment variables")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="wait for ranks (default: 60)")


DESCRIPTION = "Check this machine, or under torchrun all machines of a job and the connections between them."
main = Command("doctor", DESCRIPTION, EXAMPLES, _add_arguments, _run)
