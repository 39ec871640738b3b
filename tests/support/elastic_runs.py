"""Jobs of torchrun whose processes are killed, and that go on by themselves with the bits of an undisturbed job.

    python -m tests.support.elastic_runs [--restarts 1] [--fewer 1]

from the repository's root: twice a rank is killed in one job; then one of two nodes is killed, and the job goes on with
half of its ranks. The model is compiled from a TARGET, in exact mode, so that all runs have one result.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zbcompile
from tests.support.ports import free_port

HERE = "tests.support.elastic_runs"
STEPS, KILLS = 20, (7, 13)
ROOT = Path(__file__).parents[2]


def model() -> zbcompile.Example:
    """The TARGET."""
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    return zbcompile.Example(layers, (torch.randn(2, 16),), loss=nn.functional.mse_loss, target=torch.randn(2, 16))


def batches(start: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Batches by their numbers. ELASTIC_KILLS names a folder: in it stand the kills that have been made."""
    generator = torch.Generator()
    for number in itertools.count(start):
        _disturb(number)
        generator.manual_seed(number)
        yield (torch.randn(16, 16, generator=generator),), {"target": torch.randn(16, 16, generator=generator)}


def _disturb(number: int) -> None:
    folder, what = os.environ.get("ELASTIC_KILLS"), os.environ.get("ELASTIC_WHAT")
    last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    if folder and last and number in (KILLS if what == "rank" else KILLS[:1]):
        mark = Path(folder) / f"kill-{number}"
        if not mark.exists():
            mark.touch()
            if what == "node":  # its agent, and then itself
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def command(folder: Path, name: str, nodes: str, per_node: int, port: int, first: bool) -> list[str]:
    """torchrun with a run that resumes. The `first` agent keeps the store of torchrun's rendezvous, without which no
    job goes on; on one machine that would otherwise be the agent that came first."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", str(per_node)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", name]
    limits = [
        "--max-restarts",
        "3",
        "--rdzv-conf",
        f"last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={first}",
    ]
    return [
        *(*launcher, *meeting, *limits, "-m", "zbcompile.run", f"{HERE}:model", "--data", f"{HERE}:batches"),
        *("--schedule", "1f1b", "--microbatches", "8", "--exact", "--steps", str(STEPS), "--every", "5", "--seed", "1"),
        *("--checkpoint", str(folder / name), "--resume", "--export", str(folder / f"{name}.safetensors")),
        *("--timeout", "20"),
    ]


def run(folder: Path, name: str, what: str, nodes: int, per_node: int) -> bytes:
    """The weights of a job that `what` disturbs."""
    port = free_port()
    kills = folder / f"{name}-kills"
    kills.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"ELASTIC_KILLS": str(kills) if what else "", "ELASTIC_WHAT": what}
    agents = []
    for number in range(nodes):
        span = f"1:{nodes}" if nodes > 1 else "1"
        log = (folder / f"{name}-{number}.txt").open("w")
        agents.append(
            subprocess.Popen(
                command(folder, name, span, per_node, port, number == 0), env=environment, stdout=log, stderr=log
            )
        )
        time.sleep(1)
    codes = [agent.wait(timeout=400) for agent in agents]
    for number in range(nodes):
        for line in (folder / f"{name}-{number}.txt").read_text().splitlines():
            if "zbcompile.run" in line or "step" in line:
                print(f"  node {number}: {line[:160]}")
    print(f"{name}: {len(list(kills.iterdir()))} kills, exit statuses {codes}", flush=True)
    if not (folder / f"{name}.safetensors").exists():
        print((folder / f"{name}-0.txt").read_text()[-6000:])
        return b""
    return (folder / f"{name}.safetensors").read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description="Jobs of torchrun whose processes are killed.")
    parser.add_argument("--restarts", type=int, default=1, help="jobs in which a rank is killed twice")
    parser.add_argument("--fewer", type=int, default=1, help="jobs that lose one of two nodes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        undisturbed = run(folder, "undisturbed", "", 1, 2)
        jobs = [("restarts", "rank", 1, options.restarts), ("fewer", "node", 2, options.fewer)]
        for name, what, nodes, times in jobs:
            for number in range(times):
                same = run(folder, f"{name}{number}", what, nodes, 2) == undisturbed
                print(f"{name}: weights {'bitwise equal' if same else 'DIFFER'}", flush=True)


if __name__ == "__main__":
    main()
