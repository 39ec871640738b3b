"""Ranks that hold different values of what they share do not train."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from zbcompile.distributed.equal_tensors import CHUNK, checksum

WIDTH = 8


@given(st.lists(st.integers(0, 255), max_size=24), st.data())
def test_a_checksum_sees_every_bit(values: list[int], data: st.DataObject) -> None:
    """Equal for equal bits, in whatever memory; another one for another bit, element or order."""
    tensor = torch.tensor(values, dtype=torch.uint8)
    assert checksum(tensor) == checksum(torch.stack([tensor, tensor], 1)[:, 1])
    if values:
        second, at, bit = (
            tensor.clone(),
            data.draw(st.integers(0, len(values) - 1)),
            data.draw(st.integers(0, 7)),
        )
        second[at] = int(second[at]) ^ (1 << bit)
        assert checksum(second) != checksum(tensor)
    turned = tensor.flip(0)
    assert (checksum(turned) == checksum(tensor)) == torch.equal(turned, tensor)


def test_a_checksum_of_any_dtype() -> None:
    for dtype in (
        torch.float64,
        torch.bfloat16,
        torch.bool,
        torch.complex64,
        torch.int64,
        torch.float8_e4m3fn,
    ):
        ones, zeros = (make(3, 5).to(dtype) for make in (torch.ones, torch.zeros))
        assert checksum(ones) == checksum(ones.clone()) != checksum(zeros)
    long = torch.zeros(2 * CHUNK + 3, dtype=torch.int8)
    moved = long.clone()
    long[0], moved[CHUNK] = 1, 1
    assert checksum(long) != checksum(moved)


def untied(problem: str, schedule: str, seed: int, together: bool) -> str:
    """A step of a model that each rank seeds with `seed` + its rank; the error, if any. `together`:
    after loading the first rank's values everywhere."""
    torch.manual_seed(seed + dist.get_rank())
    chosen = PROBLEMS[problem]
    pipe = zbcompile.pipeline(chosen.make(), schedule=schedule, microbatches=4, loss=chosen.loss)
    batch = chosen.batches(1, 8)[0]
    pipe.compile(*batch.args, target=batch.target)
    if together:
        pipe.load_state_dict(pipe.state_dict(full=True))
    try:
        pipe.step(*batch.args, target=batch.target)
    except zbcompile.PipelineError as error:
        return str(error)
    return ""


class Replica(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def replicas_that_load_different_values() -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    pipe = zbcompile.pipeline(
        Replica(), schedule="1f1b", microbatches=2, loss=F.mse_loss, mesh=mesh
    )
    x = torch.ones(4, WIDTH)
    pipe.compile(x, target=x)
    pipe.load_state_dict(
        {
            "layer.weight": torch.ones(WIDTH, WIDTH),
            "layer.bias": torch.full((WIDTH,), dist.get_rank()),
        }
    )
    try:
        pipe.step(x, target=x)
    except zbcompile.PipelineError as error:
        return str(error)
    return ""


def all_cases() -> list[str]:
    return [
        untied("small-tied", "1f1b", 0, together=False),
        untied("small-tied", "1f1b", 0, together=True),
        untied("short-mlp", "dualpipe", 0, together=False),
        replicas_that_load_different_values(),
    ]


@pytest.mark.slow
def test_ranks_that_start_with_different_values(pool: Pool) -> None:
    """Tied parameters, model copies and replicas are compared, and may be made equal before the
    first step."""
    for tied, loaded, copies, replicas in pool.run(all_cases, ranks=2):
        assert "token.weight is shared by ranks 0 and 1, which hold different values" in tied
        assert "torch.manual_seed" in tied
        assert not loaded
        assert "layers.0.weight (and 7 more tensors) is shared by ranks 0 and 1" in copies
        assert "layer.bias is shared by ranks 0 and 1" in replicas


def test_signs_do_not_cancel_out() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        ones = torch.ones(6, dtype=dtype)
        turned = ones * torch.tensor([1, -1, 1, 1, -1, 1], dtype=dtype)
        assert len({checksum(ones), checksum(turned), checksum(-ones)}) == 3
