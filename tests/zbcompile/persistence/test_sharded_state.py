"""Optimizer state that replicas hold in parts is saved as if it were whole."""

from pathlib import Path

import pytest
import torch
from torch import nn

import zbcompile
from tests.support.checkpointing import State, state_of
from tests.support.oracle import PROBLEMS
from tests.support.pool import Pool
from tests.support.sharded_optimizers import Training, saved_and_moved
from tests.support.training import assert_same_tensors

MOVES = (("zb-v", 1, 2), ("zb-h1", 0, 1))


def in_one_process(training: Training, folder: Path) -> State:
    """Returns what a plain model and a plain optimizer make of a checkpoint."""
    model = PROBLEMS[training.problem].model().to(getattr(torch, training.dtype))
    nn.init.zeros_(next(model.parameters()))
    parameters = list(model.parameters())
    groups = [[p for p in parameters if p.ndim < 2], [p for p in parameters if p.ndim >= 2]]
    optimizer = torch.optim.AdamW([{"params": groups[0], "lr": 5.0}, {"params": groups[1]}], lr=5.0)
    zbcompile.load_checkpoint(folder, model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 1e-2]
    return state_of(model, optimizer)


@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize("training", [Training(), Training("short-mlp", dtype="bfloat16")], ids=str)
def test_state_moves_between_levels_replicas_schedules_and_a_plain_optimizer(
    training: Training, pool: Pool, tmp_path: Path
) -> None:
    pool.run(saved_and_moved, training, str(tmp_path), MOVES, ranks=2)
    expected = in_one_process(training, tmp_path / "0")
    assert expected.moments
    for number in range(1, len(MOVES) + 2):
        result = in_one_process(training, tmp_path / str(number))
        assert_same_tensors(result.weights, expected.weights, f"checkpoint {number}, weights:")
        assert_same_tensors(result.moments, expected.moments, f"checkpoint {number}, state:")
