"""Every wait lasts `timeout=`, whoever made the process group: a rank that comes late to a call by
less is waited for, by more it is named by all. Each kind of wait once."""

import itertools
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import zbcompile
from tests.support.faulty import make, rows, sharding
from tests.support.pool import Pool
from tests.support.ports import free_port

OURS, SCRIPTS = "ours", "the script's"
# by the part: the watch looks twice a second, and gives up half a second late
TIMEOUTS = {0.8: 6.0, 1.2: 8.0}


@dataclass(frozen=True)
class Case:
    """Rank `late` comes to a call of a `kind` later than the others, by a `part` of the timeout."""

    kind: str
    part: float
    group: str = OURS
    late: int = 1

    @property
    def timeout(self) -> float:
        return TIMEOUTS[self.part]

    def judge(self, said: list[str]) -> str:
        """Returns what is not good about what the ranks said."""
        if self.part < 1:
            return "; ".join(item for item in said if item)
        named = rf"rank {self.late} failed at|found no process group"
        return "; ".join(f"{item!r}" for item in said if not re.search(named, item))


def come_late(case: Case, port: int, folder: str) -> str:
    """Returns what one of two ranks raised; empty if all went well. The worker gives up the group
    of the pool, and none is left."""
    rank = dist.get_rank()
    dist.barrier()  # the other one has joined, too
    dist.destroy_process_group()
    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"LOCAL_RANK": rank}
    try:
        with patch.dict(os.environ, {name: str(value) for name, value in place.items()}):
            _call_late(case, rank, Path(folder))
    except zbcompile.PipelineError as error:
        time.sleep(0.5 * case.timeout)  # rank 0 may keep the store
        return str(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return ""


def _call_late(case: Case, rank: int, folder: Path) -> None:
    if case.group != OURS:
        dist.init_process_group("gloo")
    delay = case.part * case.timeout if rank == case.late else 0.0
    if case.kind == "start":
        time.sleep(delay)
    sharded = case.kind == "collective"
    pipe = sharding(case.timeout) if sharded else make(timeout=case.timeout)
    target = torch.arange(8) if sharded else rows()
    batches = (rows(samples) for samples in itertools.count(8, 4))
    try:
        pipe.step(rows(), target=target)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        zbcompile.save_checkpoint(folder, pipe, optimizer)
        calls: dict[str, Callable[[], object]] = {
            "compile": lambda: pipe.compile(x := next(batches), target=x),
            "save": lambda: zbcompile.save_checkpoint(folder, pipe, optimizer, keep=1),
            "load": lambda: zbcompile.load_checkpoint(folder, pipe, optimizer),
            "eval": lambda: pipe.eval(rows()),
            "clip": lambda: pipe.clip_grad_norm_(1.0),
            "state_dict": lambda: pipe.state_dict(full=True),
        }
        call = calls.get(case.kind, lambda: pipe.step(rows(), target=target))
        call()  # what comes with the first one is over
        time.sleep(delay if case.kind != "start" else 0.0)
        call()
    finally:
        pipe.close()


CASES = (
    Case("receive", 1.2, SCRIPTS, 0),
    Case("receive", 0.8, OURS, 1),
    Case("start", 0.8, OURS, 0),
    Case("collective", 0.8, SCRIPTS, 0),
    Case("compile", 0.8, SCRIPTS, 0),
    Case("load", 0.8, SCRIPTS, 1),
    Case("eval", 1.2, OURS, 1),
    Case("save", 1.2, SCRIPTS, 1),
    Case("clip", 1.2, SCRIPTS, 0),
    Case("state_dict", 0.8, SCRIPTS, 1),
)


@pytest.mark.mostly_slow(every=10)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_that_is_late(case: Case, pool: Pool, tmp_path: Path) -> None:
    """Stores that a launcher keeps: `examples/benchmarks/fault_sweep.py`."""
    outcomes = pool.outcomes(come_late, case, free_port(), str(tmp_path))
    assert case.judge([outcome.text or outcome.value for outcome in outcomes]) == ""
