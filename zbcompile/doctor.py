"""`python -m zbcompile.doctor`: check a machine, or under torchrun a cluster, before a run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from zbcompile.cli.exit_status import exit_status
from zbcompile.cli.machine_report import lines_of, problems_of, report_here
from zbcompile.distributed.agreement import from_first, gathered, together
from zbcompile.distributed.link_speed import measure_pairs
from zbcompile.distributed.process_group import find_ranks, is_alone
from zbcompile.distributed.ranks import Ranks
from zbcompile.env import VARIABLES
from zbcompile.errors import PipelineError

MARK = ".doctor"  # the first rank's file in the folder
EXAMPLES = """examples:
  python -m zbcompile.doctor --checkpoint checkpoints
  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m zbcompile.doctor
It prints each rank's interfaces, versions, threads and disk, and of every two ranks latency, bandwidth and how far
their clocks differ; then what is wrong.
exit status: 0, or 2 if something is wrong, with one line on standard error if the ranks do not find each other.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on this rank; returns the exit status."""
    chosen = _parser().parse_args(arguments)
    try:
        return exit_status("zbcompile.doctor", lambda: _run(chosen), chosen.debug)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _run(chosen: argparse.Namespace) -> None:
    if chosen.env:
        print("\n".join(map(str, VARIABLES)))
    ranks = find_ranks(lambda: torch.device("cpu"), 1 if is_alone() else None, None, chosen.timeout)
    try:
        problems = _examine(ranks, chosen.checkpoint)
    finally:
        ranks.watch.close()
    if problems and ranks.is_first:
        print("\n".join(f"PROBLEM: {each}" for each in problems), flush=True)
        raise PipelineError(f"{len(problems)} problems, listed on standard output.")


def _examine(ranks: Ranks, folder: Path | None) -> list[str]:
    """Print what all ranks report; what is wrong with it."""
    with ranks.watch.region("checking the cluster"):
        from_first(ranks, f"writing to {folder}", lambda: _leave_mark(folder))
        reports = gathered(ranks, together(ranks, "checking a machine", lambda: report_here(folder, MARK)))
        pairs = []
        if ranks.everyone is not None:
            with ranks.watch.position.waiting("measuring the connections"):
                pairs = measure_pairs(ranks.everyone)
        pairs = [pair for found in gathered(ranks, pairs) for pair in found]
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zbcompile.doctor",
        description="Check this machine, or under torchrun all machines of a job and the connections between them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="also check the disk of this shared folder")
    parser.add_argument("--env", action="store_true", help="also list zbcompile's environment variables")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="wait for ranks (default: 60)")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser


if __name__ == "__main__":
    sys.exit(main())
