"""Ranks that hold different values of what they share do not train."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from tests.support.refused import said
from tests.support.training import Case, compile_for_forks, compiled_once
from zbcompile.distributed.equal_tensors import CHUNK, checksum


@given(st.lists(st.integers(0, 255), max_size=24), st.data())
def test_a_checksum_sees_every_bit(values: list[int], data: st.DataObject) -> None:
    """Equal for equal bits, in whatever memory; another one for another bit, element or order."""
    tensor = torch.tensor(values, dtype=torch.uint8)
    assert checksum(tensor) == checksum(torch.stack([tensor, tensor], 1)[:, 1])
    if values:
        second, at = tensor.clone(), data.draw(st.integers(0, len(values) - 1))
        second[at] = int(second[at]) ^ (1 << data.draw(st.integers(0, 7)))
        assert checksum(second) != checksum(tensor)
    turned = tensor.flip(0)
    assert (checksum(turned) == checksum(tensor)) == torch.equal(turned, tensor)


def test_a_checksum_of_any_dtype() -> None:
    """Signs do not cancel out, nor do places in long tensors."""
    for name in ("float64", "bfloat16", "bool", "complex64", "int64", "float8_e4m3fn"):
        ones, zeros = (make(3, 5).to(getattr(torch, name)) for make in (torch.ones, torch.zeros))
        assert checksum(ones) == checksum(ones.clone()) != checksum(zeros)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        ones = torch.ones(6, dtype=dtype)
        turned = ones * torch.tensor([1, -1, 1, 1, -1, 1], dtype=dtype)
        assert len({checksum(ones), checksum(turned), checksum(-ones)}) == 3
    long = torch.zeros(2 * CHUNK + 3, dtype=torch.int8)
    moved = long.clone()
    long[0], moved[CHUNK] = 1, 1
    assert checksum(long) != checksum(moved)


def untied(problem: str, schedule: str) -> list[str]:
    """Returns what is said of a step of a model that each rank seeds with its rank; before and after
    loading the first rank's values everywhere."""
    torch.manual_seed(dist.get_rank())
    chosen = PROBLEMS[problem]
    pipe = zbcompile.pipeline(chosen.make(), schedule=schedule, microbatches=4, loss=chosen.loss)
    batch = chosen.batches(1, 8)[0]
    with compiled_once(problem, exact=False):
        pipe.compile(*batch.args, target=batch.target)
    before = said(lambda: pipe.step(*batch.args, target=batch.target))[1]
    pipe.load_state_dict(pipe.state_dict(full=True))
    return [before, said(lambda: pipe.step(*batch.args, target=batch.target))[1]]


def replicas_that_load_different_values() -> str:
    options: Any = {"schedule": "1f1b", "microbatches": 2, "mesh": mesh_of(dp=2, pp=1)}
    pipe, x = zbcompile.pipeline(nn.Linear(8, 8), loss=F.mse_loss, **options), torch.ones(4, 8)
    pipe.compile(x, target=x)
    bias = torch.full((8,), float(dist.get_rank()))
    pipe.load_state_dict({"weight": torch.ones(8, 8), "bias": bias})
    return said(lambda: pipe.step(x, target=x))[1]


def all_cases() -> list[str]:
    cases = (untied("small-tied", "1f1b"), untied("short-mlp", "dualpipe"))
    return [*cases[0], *cases[1], replicas_that_load_different_values()]


@pytest.mark.slow
def test_ranks_that_start_with_different_values(pool: Pool) -> None:
    """Tied parameters, model copies and replicas are compared, and may be made equal before the
    first step."""
    compile_for_forks(Case("small-tied", "1f1b", 2, 4, exact=False))
    for tied, loaded, copies, loaded_copies, replicas in pool.run(all_cases):
        assert "token.weight is shared by ranks 0 and 1, which hold different values" in tied
        assert "torch.manual_seed" in tied
        assert (loaded, loaded_copies) == ("", "")
        assert "layers.0.weight (and 7 more tensors) is shared by ranks 0 and 1" in copies
        assert "bias is shared by ranks 0 and 1" in replicas
