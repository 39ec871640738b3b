"""Bytes and seconds of a checkpoint, in addition to those of torch.distributed.checkpoint with its
own files.

    python examples/benchmarks/checkpoint_cost.py --mebibytes 64 --rounds 5

A stack of linear layers with Adam: the tensors are three times `--mebibytes`. Both save and load in
turn, into a folder of --folder; the least of all rounds counts, by the clock on the wall and as the
CPU time of the process. What is written is in the system's cache, so reading it costs no disk. The
script calls what `zbcompile` any revision has: with `PYTHONPATH` set to another checkout it
measures that one.
"""

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tabulate import tabulate
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zbcompile

WIDTH = 1024  # a layer without its bias is 4 MiB
Case = tuple[nn.Module, torch.optim.Optimizer]


def trained(mebibytes: int) -> Case:
    """A model after a step of Adam."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, mebibytes // 4))))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_with_dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True)


def load_with_dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


FORMATS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "zbcompile": (zbcompile.save_checkpoint, zbcompile.load_checkpoint),
    "torch.distributed.checkpoint": (save_with_dcp, load_with_dcp),
}


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the wall, and of all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def one_round(way: str, folder: Path, case: Case, empty: Case) -> tuple[tuple[float, float], ...]:
    save, load = FORMATS[way]
    shutil.rmtree(folder, ignore_errors=True)
    seconds = timed(lambda: save(folder, *case)), timed(lambda: load(folder, *empty))
    pairs = zip(case[0].state_dict().values(), empty[0].state_dict().values(), strict=True)
    assert all(torch.equal(one, loaded) for one, loaded in pairs)
    return seconds


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mebibytes", type=int, default=64, help="of parameters (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where to write (default: the system's temporary folder)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    case, empty = trained(options.mebibytes), trained(options.mebibytes)
    tensor_bytes = 3 * sum(parameter.nbytes for parameter in case[0].parameters())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rounds = [
            {way: one_round(way, Path(folder) / way, case, empty) for way in FORMATS}
            for _ in range(options.rounds)
        ]
        sizes = {way: size_of(Path(folder) / way) for way in FORMATS}
    print(
        f"{tensor_bytes / 2**20:.0f} MiB of tensors, zbcompile in {Path(zbcompile.__file__).parent.parent}"
    )
    rows = [
        (
            way,
            f"{sizes[way]:,}",
            sizes[way] - tensor_bytes,
            *(min(r[way][i][j] for r in rounds) for i in (0, 1) for j in (0, 1)),
        )
        for way in FORMATS
    ]
    print(
        tabulate(
            rows,
            ("", "bytes", "more than tensors", "save s", "CPU s", "load s", "CPU s"),
            floatfmt=".3f",
        )
    )


if __name__ == "__main__":
    main()
