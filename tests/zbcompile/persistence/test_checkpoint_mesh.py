"""Checkpoints of models whose tensors are sharded next to the pipeline: saved on one mesh, loaded on
another."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor

import zbcompile
from tests.support.dtensor_models import LENGTH, VOCABULARY, Llama, loss_of, parallelised
from tests.support.meshes import mesh_of
from tests.support.parallel_models import LENGTH as POSITIONS, WIDTH, TensorParallel
from tests.support.pool import Pool
from tests.support.training import assert_same_tensors

ROWS, MICROBATCHES = 8, 4
State = dict[str, Tensor]
Sizes = dict[str, int]


def begun(sizes: Sizes, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """A pipeline that has trained one step."""
    mesh = mesh_of(**sizes)
    model = parallelised(mesh["tp"], "plain", layers=1) if "tp" in sizes else Llama(layers=1)
    pipe = zbcompile.pipeline(
        model, mesh=mesh, schedule="zb-h1", microbatches=MICROBATCHES, loss=loss_of
    )
    torch.manual_seed(seed)
    x, y = torch.randint(VOCABULARY, (2, ROWS, LENGTH)).unbind()
    pipe.compile(x, target=y)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    pipe.step(x, target=y)
    optimizer.step()
    optimizer.zero_grad()
    return pipe, optimizer


def whole(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def contents(named: Any, optimizer: torch.optim.Optimizer) -> State:
    """Parameters and moments, whole."""
    result = {}
    for name, parameter in named:
        result[name] = whole(parameter)
        result |= {
            f"{name}.{key}": whole(value) for key, value in optimizer.state[parameter].items()
        }
    return result


def require_weights(folder: Path, source: Any, result: State) -> None:
    """The file of weights has what the checkpoint has."""
    for parameter in source.parameters():
        torch.nn.init.zeros_(parameter)
    zbcompile.load_weights(folder / "weights", source)
    weights = {name: whole(parameter) for name, parameter in source.named_parameters()}
    assert_same_tensors(weights, {name: result[name] for name in weights}, "weight")


def trained(sizes: Sizes, earlier: Path | None, folder: Path) -> tuple[State, State]:
    """Returns what a pipeline on this mesh reads from an `earlier` checkpoint, and what it saves
    in `folder` a step later."""
    pipe, optimizer = begun(sizes, seed=1)
    before: State = {}
    if earlier is not None:
        zbcompile.load_checkpoint(earlier, pipe, optimizer)
        before = contents(pipe.named_parameters(), optimizer)
        require_weights(earlier, pipe, before)
        optimizer.step()  # with the state that was loaded
    zbcompile.save_checkpoint(folder, pipe, optimizer)
    zbcompile.save_weights(folder / "weights", pipe)
    pipe.close()
    return before, contents(pipe.named_parameters(), optimizer)


def in_one_process(folder: Path) -> State:
    model = Llama(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.zeros(1, LENGTH, dtype=torch.long)).sum().backward()
    optimizer.step()
    zbcompile.load_checkpoint(folder, model, optimizer)
    result = contents(model.named_parameters(), optimizer)
    require_weights(folder, model, result)
    return result


MESHES: tuple[Sizes, ...] = ({"tp": 2}, {"pp": 2, "tp": 2})


@pytest.mark.slow
def test_parameters_and_moments_of_another_mesh(pool: Pool, tmp_path: Path) -> None:
    """From mesh to mesh, and from each to one process. The rows of embedding and head are uneven
    along "tp"."""
    earlier, expected = None, State()
    for number, sizes in enumerate(MESHES):
        folder = tmp_path / str(number)
        parts = pool.run(trained, sizes, earlier, folder, ranks=math.prod(sizes.values()))
        for read, _ in parts:
            assert_same_tensors(read, {name: expected[name] for name in read}, "read")
        earlier, expected = (
            folder,
            {name: value for _, written in parts for name, value in written.items()},
        )
        assert_same_tensors(in_one_process(folder), expected, "saved")


def by_hand(folder: Path) -> tuple[State, State, State]:
    """Returns what was saved, what there was a step later, and what was loaded then."""
    mesh = mesh_of(pp=2, tp=2)
    model = TensorParallel(mesh, "plain")
    options: dict[str, Any] = {
        "loss": F.mse_loss,
        "placements": model.PLACEMENTS,
        "microbatches": MICROBATCHES,
    }
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="zb-h1", **options)
    torch.manual_seed(0)
    x, y = torch.randn(2, ROWS, POSITIONS, WIDTH).unbind()
    pipe.compile(x, target=y)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    result = []
    for act in (zbcompile.save_checkpoint, None, zbcompile.load_checkpoint):
        pipe.step(x, target=y)
        optimizer.step()
        if act is not None:
            act(folder, pipe, optimizer)
        result.append(contents(pipe.named_parameters(), optimizer))
    with pytest.raises(
        zbcompile.PipelineError,
        match=r"is sharded by hand, so torch\.distributed\.checkpoint would",
    ):
        dcp.save({"model": pipe}, checkpoint_id=folder)
    pipe.close()
    return result[0], result[1], result[2]


@pytest.mark.slow
def test_what_is_sharded_by_hand_is_kept_rank_by_rank(pool: Pool, tmp_path: Path) -> None:
    for saved, later, loaded in pool.run(by_hand, tmp_path, ranks=4):
        assert not any(torch.equal(later[name], saved[name]) for name in saved)
        assert_same_tensors(loaded, saved, "saved")
    with pytest.raises(
        zbcompile.PipelineError, match=re.escape("unexpected ['layers.0.columns (tp 0 of 2)'")
    ):
        zbcompile.load_checkpoint(tmp_path, TensorParallel(None, "plain"))
