"""A pipeline and its optimizer are Stateful for torch.distributed.checkpoint, which takes them as
they are."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

import zbcompile
from tests.support.meshes import mesh_of
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors
from tests.zbcompile.persistence.test_checkpoint import TOKENS, Words, loss_of


def begun(layout: Any, seed: int, dtype: torch.dtype) -> Any:
    sizes, schedule, zero, vocab = layout
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "schedule": schedule,
        "microbatches": 2,
        "vocab": vocab,
        "loss": loss_of,
    }
    pipe = zbcompile.pipeline(Words().to(dtype), mesh=mesh_of(**sizes), **options)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1 + seed, zero=zero)
    return pipe.compile(TOKENS, target=TOKENS), optimizer


def train(pipe: Any, optimizer: Any, steps: int) -> dict[str, torch.Tensor]:
    for _ in range(steps):
        pipe.step(TOKENS, target=TOKENS)
        optimizer.step()
        optimizer.zero_grad()
    return dict(pipe.state_dict(full=True))


LAYOUTS: tuple[tuple[dict[str, int], str, int, Any], ...] = (
    ({"pp": 1, "dp": 2}, "1f1b", 1, "off"),
    ({"pp": 2, "dp": 1}, "zb-h1", 0, "off"),
)
ROWS: tuple[tuple[dict[str, int], str, int, Any], ...] = (
    ({"pp": 4}, "1f1b", 0, 1),
    ({"pp": 2, "dp": 2}, "1f1b", 1, 1),
)


def moved(folder: Path, layouts: Any, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    pipe, optimizer = begun(layouts[0], 0, dtype)
    assert isinstance(pipe, Stateful)
    assert isinstance(optimizer, Stateful)
    train(pipe, optimizer, 2)
    dcp.save({"model": pipe, "optimizer": optimizer}, checkpoint_id=folder / "0")
    expected = train(pipe, optimizer, 1)
    pipe.close()
    for number, layout in enumerate(layouts[1:]):
        pipe, optimizer = begun(layout, 1, dtype)
        dcp.load({"model": pipe, "optimizer": optimizer}, checkpoint_id=folder / str(number))
        dcp.save({"model": pipe, "optimizer": optimizer}, checkpoint_id=folder / str(number + 1))
        assert optimizer.param_groups[0]["lr"] == 0.1
        result = train(pipe, optimizer, 1)
        close = {name: torch.allclose(result[name], expected[name], atol=1e-5) for name in result}
        assert all(close.values()), close
        pipe.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "dtype"),
    [(LAYOUTS, torch.bfloat16), pytest.param(ROWS, torch.float32, marks=pytest.mark.beyond_sample)],
    ids=str,
)
def test_torchs_save_and_load(layouts: Any, dtype: torch.dtype, pool: Pool, tmp_path: Path) -> None:
    pool.run(moved, tmp_path, layouts, dtype, ranks=math.prod(layouts[0][0].values()))


def test_one_process_has_the_bits_of_five_more_steps(tmp_path: Path) -> None:
    def begin(seed: int) -> Any:
        torch.manual_seed(seed)
        options: dict[str, Any] = {
            "schedule": "zb-h1",
            "microbatches": 2,
            "loss": loss_of,
            "ranks": 2,
        }
        pipe = zbcompile.pipeline(Words(), **options)
        return pipe.compile(TOKENS, target=TOKENS), pipe.optimizer(torch.optim.AdamW, lr=0.1 + seed)

    pipe, optimizer = begin(0)
    train(pipe, optimizer, 2)
    dcp.save({"model": pipe, "optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    second, rest = begin(1)
    dcp.load({"model": second, "optimizer": rest}, checkpoint_id=tmp_path, no_dist=True)
    assert_same_tensors(train(second, rest, 5), train(pipe, optimizer, 5), "parameter")
