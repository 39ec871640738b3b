"""Jobs of torchrun whose processes are killed, and that go on by themselves with the bits of an
undisturbed job.

    python -m tests.support.elastic_runs [--restarts 1]

from the repository's root: twice a rank is killed in one job.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zbcompile

HERE = "tests.support.elastic_runs"
STEPS, KILLS = 20, (7, 13)
ROOT = Path(__file__).parents[2]


def save_program(folder: Path) -> None:
    """The program of two ranks, and its first weights."""
    torch.manual_seed(1)
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    pipe = zbcompile.pipeline(
        layers, schedule="1f1b", ranks=2, microbatches=8, loss=nn.functional.mse_loss
    )
    pipe.compile(torch.randn(16, 16), target=torch.randn(16, 16)).program.save(folder / "program")
    zbcompile.save_weights(folder / "first.safetensors", layers)


def batches(start: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Batches by their numbers. ELASTIC_KILLS names a folder: in it stand the kills that have been
    made."""
    generator = torch.Generator()
    for number in itertools.count(start):
        _disturb(number)
        generator.manual_seed(number)
        yield (
            (torch.randn(16, 16, generator=generator),),
            {"target": torch.randn(16, 16, generator=generator)},
        )


def _disturb(number: int) -> None:
    folder = os.environ.get("ELASTIC_KILLS")
    last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    if folder and last and number in KILLS:
        mark = Path(folder) / f"kill-{number}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path, name: str, killed: bool) -> bytes:
    """The weights of a job."""
    kills = folder / f"{name}-kills"
    kills.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"ELASTIC_KILLS": str(kills) if killed else ""}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(
            "--max-restarts",
            "3",
            "-m",
            "zbcompile.run",
            str(folder / "program"),
            "--data",
            f"{HERE}:batches",
        ),
        *(
            "--weights",
            str(folder / "first.safetensors"),
            "--steps",
            str(STEPS),
            "--every",
            "5",
            "--seed",
            "1",
        ),
        *(
            "--checkpoint",
            str(folder / name),
            "--resume",
            "--export",
            str(folder / f"{name}.safetensors"),
        ),
        *("--timeout", "20"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    print(f"{name}: {len(list(kills.iterdir()))} kills, exit status {done.returncode}", flush=True)
    if done.returncode:
        print((done.stdout + done.stderr)[-6000:])
        return b""
    return (folder / f"{name}.safetensors").read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description="Jobs of torchrun whose processes are killed.")
    parser.add_argument(
        "--restarts", type=int, default=1, help="jobs in which a rank is killed twice"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_program(folder)
        undisturbed = run(folder, "undisturbed", False)
        for number in range(options.restarts):
            same = run(folder, f"restarts{number}", True) == undisturbed != b""
            print(f"restarts: weights {'bitwise equal' if same else 'DIFFER'}", flush=True)


if __name__ == "__main__":
    main()
