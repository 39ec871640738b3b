"""The calibrate command: measure the machine at hand for `--hardware FILE`."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from zbcompile.cli.command_line import Command, ranks_for
from zbcompile.distributed.agreement import together
from zbcompile.distributed.link_speed import MeasuredLink, measure_pairs
from zbcompile.distributed.process_group import own_device
from zbcompile.distributed.ranks import Ranks
from zbcompile.errors import PipelineError
from zbcompile.passes.machine.hardware import Connection, Hardware
from zbcompile.prediction.calibration import ELEMENTS, ENOUGH, ROUNDS, Bench, measure_machine
from zbcompile.progress import Say
from zbcompile.safe_files import write_whole

LOADED, WORKED = 0.25, 0.95  # processes for each processor, and the share of the time: beyond, others disturb
AGAIN = "Its times may be 10 % off or more: measure again while nothing else runs."

EXAMPLES = """examples:
  python -m zbcompile.calibrate --output machine.toml
  torchrun --nproc-per-node 2 -m zbcompile.calibrate --output machine.toml
  python -m zbcompile.inspect examples/targets.py:gpt --hardware machine.toml
Takes about half a minute on a CPU. Measures products, kernels and what starting them takes; under torchrun on all
ranks at once, as they work at once in a step (the median of their figures counts), and then the connection of every
two ranks.
"""


def _run(chosen: argparse.Namespace, say: Say) -> None:
    if chosen.output.suffix != ".toml":
        raise PipelineError(f"--output {chosen.output}: expected a file that ends in .toml")
    if not chosen.output.parent.is_dir():
        raise PipelineError(f"--output {chosen.output}: there is no directory {chosen.output.parent}")
    torch.set_num_threads(chosen.threads)
    with ranks_for("measuring the machine", own_device, chosen.timeout) as ranks:
        _measure(ranks, chosen.output, chosen.quick, say)


def _measure(ranks: Ranks, file: Path, quick: bool, say: Say) -> None:
    """All ranks measure their machine at once, as they compute at once in a step; the figures are the first rank's."""
    enough, elements = (0.0, ELEMENTS[:-1]) if quick else (ENOUGH, ELEMENTS)
    bench = Bench(own_device(), enough, elements, min if ranks.everyone is None else median)
    rounds, load = 1 if quick else ROUNDS, os.getloadavg()[0] / (os.cpu_count() or 1)
    wall, own = time.perf_counter(), time.thread_time()
    found = together(ranks, "measuring the machine", lambda: measure_machine(bench, rounds, say))
    alone = bench.device.type == "cpu" and torch.get_num_threads() == 1
    worked = (time.thread_time() - own) / (time.perf_counter() - wall) if alone else 1.0
    busy = next(filter(None, ranks.gather(why_busy(load, worked))), "")
    pairs = measure_pairs(ranks)
    if ranks.is_first:
        if busy:
            found = replace(found, sources={**found.sources, "busy": busy})
            print(f"zbcompile calibrate: the machine was busy: {busy}. {AGAIN}", file=sys.stderr)
        write_whole(file, to_toml(with_links(found, pairs, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))).encode())
        print(f"{file}: {found}")


def why_busy(load: float, worked: float) -> str:
    """What says that others used the machine while it was measured, else "": the load for each processor before, and
    the share of the time in which this thread was running.

    >>> why_busy(load=0.01, worked=0.99), why_busy(load=2.0, worked=0.4)
    ('', 'it had 2.0 processes for each processor before, and the measurement was running for 40% of its time')
    """
    if load <= LOADED and worked >= WORKED:
        return ""
    running = f"the measurement was running for {worked:.0%} of its time"
    return f"it had {load:.1f} processes for each processor before, and {running}"


def with_links(hardware: Hardware, pairs: Iterable[MeasuredLink], node_ranks: int) -> Hardware:
    """`hardware` with the median connections of `pairs`: inside a node of that many ranks, and between two."""
    near = [p for p in pairs if p.first // node_ranks == p.second // node_ranks]
    far = [p for p in pairs if p not in near]
    return replace(hardware, node_ranks=node_ranks, within=_median(near or far), between=_median(far))


def _median(pairs: Sequence[MeasuredLink]) -> Connection | None:
    return Connection(*(median(getattr(p, name) for p in pairs) for name in Connection._fields)) if pairs else None


def to_toml(hardware: Hardware) -> str:
    """The text of a file for `Hardware.read`."""
    data = hardware.to_dict()
    tables = {name: value for name, value in data.items() if isinstance(value, dict)}
    lines = [_entry(name, value) for name, value in data.items() if name not in tables]
    for name, values in tables.items():
        lines += ["", f"[{name}]", *(_entry(key, value) for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Any) -> str:
    return f"{json.dumps(key)} = {json.dumps(value)}"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", metavar="FILE.toml", type=Path, required=True, help="where to write the profile")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch's threads on a CPU (default: 1)")
    parser.add_argument("--quick", action="store_true", help="a few runs of each kernel, in seconds: rough figures")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="wait for ranks (default: 600)")


DESCRIPTION = "Measure this machine, or under torchrun a node or cluster with its connections."
main = Command("calibrate", DESCRIPTION, EXAMPLES, _add_arguments, _run)
