"""What an optimizer that is divided among replicas cannot do ends every rank with one line."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import zbcompile
from tests.support.pool import Pool
from tests.support.replicated import REPLICAS, mesh_of_replicas
from tests.support.sharded_optimizers import Training, batches, pipeline_with

TRAINING = Training("short-mlp")


def stepped_without_sum(pipe: zbcompile.Pipeline, optimizer: Any, batch: Any) -> None:
    with pipe.no_sync():
        pipe.step(*batch.args, target=batch.target)
    optimizer.step()


def clipped_by_hand(pipe: zbcompile.Pipeline, optimizer: Any, batch: Any) -> None:
    pipe.step(*batch.args, target=batch.target)
    pipe.clip_grad_norm_(1.0)


def frozen_in_between(pipe: zbcompile.Pipeline, optimizer: Any, batch: Any) -> None:
    pipe.step(*batch.args, target=batch.target)
    pipe._model.layers[0].requires_grad_(False)
    pipe.step(*batch.args, target=batch.target)


def different_on_ranks(pipe: zbcompile.Pipeline, optimizer: Any, batch: Any) -> None:
    pipe.optimizer(torch.optim.SGD, lr=0.1, clip=1.0 + dist.get_rank())
    pipe.step(*batch.args, target=batch.target)


FAULTS = {each.__name__: each for each in (stepped_without_sum, clipped_by_hand, frozen_in_between, different_on_ranks)}


def failing(fault: str) -> None:
    mesh = mesh_of_replicas()
    pipe, optimizer = pipeline_with(TRAINING, 1, mesh)
    own = list(batches(TRAINING, 1)[0].parts(REPLICAS))[mesh["dp"].get_local_rank()]
    FAULTS[fault](pipe, optimizer, own)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stepped_without_sum", "is this replica's own: the last step was inside no_sync"),
        ("clipped_by_hand", "clip_grad_norm_ needs whole gradients, and pipe.optimizer(zero=1) keeps this replica's"),
        ("frozen_in_between", "this step does not train layers.0.bias, other than the first one"),
        ("different_on_ranks", "the ranks made different optimizers: clip is 1.0 on rank 0 and 2.0 on rank 1"),
    ],
)
def test_every_rank_ends_with_one_line(fault: str, message: str, pool: Pool) -> None:
    for outcome in pool.outcomes(failing, fault, ranks=4):
        assert message in outcome.text
        assert "\n" not in outcome.text
