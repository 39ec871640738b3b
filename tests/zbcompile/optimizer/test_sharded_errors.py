"""An optimizer that is divided among replicas: what it cannot do ends every rank with one line."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from tests.support.pool import Pool
from tests.support.replicated import REPLICAS, mesh_of_replicas
from tests.support.sharded_optimizers import Training, batches, pipeline_with
from tests.support.training import assert_same_tensors

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
    optimizer.close()
    with pytest.raises(
        zbcompile.PipelineError, match=r"options\[0\]\[lr\] is 1 on rank 0 and 2 on rank 1"
    ):
        pipe.optimizer(torch.optim.SGD, lr=1 + dist.get_rank()) and pipe.compile(
            *batch.args, target=batch.target
        )
    pipe.optimizer(torch.optim.SGD, lr=0.1, clip=1.0 + dist.get_rank())


def written_on_the_way(pipe: zbcompile.Pipeline, optimizer: Any, batch: Any) -> None:
    pipe.step(*batch.args, target=batch.target)
    optimizer.step()
    optimizer.zero_grad()
    weight = pipe._model.layers[0].weight
    with torch.no_grad():
        weight.mul_(0.5)
    pipe.step(*batch.args, target=batch.target)


FAULTS = {
    each.__name__: each
    for each in (
        stepped_without_sum,
        clipped_by_hand,
        frozen_in_between,
        different_on_ranks,
        written_on_the_way,
    )
}


class Scaled(nn.Module):
    """A model with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x * self.scale))  # type: ignore[no-any-return]


def refusing(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns what one pipeline with two replicas refuses and goes on from; the state before and after a
    checkpoint."""
    mesh = mesh_of_replicas()
    pipe = zbcompile.pipeline(
        Scaled(), schedule="1f1b", microbatches=2, loss=nn.functional.mse_loss, mesh=mesh
    )
    optimizer, batch = pipe.optimizer(torch.optim.AdamW, zero=1), torch.ones(4, 4)
    pipe.step(batch, target=batch)
    optimizer.step()
    pipe._model.zero_grad()
    with pytest.raises(
        zbcompile.PipelineError,
        match=r"that an update has used already. Call optimizer.zero_grad\(\)",
    ):
        pipe.step(batch, target=batch)
    optimizer.zero_grad()
    with pytest.raises(
        zbcompile.PipelineError, match=r"linear.bias is in two optimizers .* with zero=1, overlap=F"
    ):
        pipe.optimizer(torch.optim.SGD)
    before = optimizer.state_dict()
    theirs: list[Any] = [None, None]
    dist.all_gather_object(theirs, before)
    with pytest.raises(
        zbcompile.PipelineError, match=r"of another rank, or another zero=.*save_checkpoint"
    ):
        optimizer.load_state_dict(theirs[1 - dist.get_rank()])
    zbcompile.save_checkpoint(folder, pipe, optimizer)
    optimizer.load_state_dict(
        {key: value for key, value in before.items() if not key.startswith("state.")}
    )
    zbcompile.load_checkpoint(folder, pipe, optimizer)
    after = copy.deepcopy(tensors_of(optimizer.state_dict()))
    pipe.step(batch, target=batch)
    optimizer.step()
    optimizer.close()
    second = pipe.optimizer(torch.optim.AdamW)
    with pytest.raises(zbcompile.PipelineError, match=r"has no optimizer state for"):
        second.load_state_dict({})
    second.close()
    pipe.optimizer(torch.optim.AdamW, zero=1).load_state_dict(before)
    return tensors_of(theirs[dist.get_rank()]), after


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim()}


def test_what_is_refused_leaves_the_pipeline_as_it_was(pool: Pool, tmp_path: Path) -> None:
    for before, after in pool.run(refusing, str(tmp_path), ranks=2):
        assert_same_tensors(after, before, "state:")


def failing(fault: str) -> None:
    mesh = mesh_of_replicas()
    pipe, optimizer = pipeline_with(TRAINING, 1, mesh)
    local = list(batches(TRAINING, 1)[0].parts(REPLICAS))[mesh["dp"].get_local_rank()]
    FAULTS[fault](pipe, optimizer, local)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stepped_without_sum", "is this replica's own: the last step was inside no_sync"),
        (
            "clipped_by_hand",
            (
                "clip_grad_norm_ needs whole gradients, and pipe.optimizer(zero=1) keeps this"
                " replica's"
            ),
        ),
        ("frozen_in_between", "this step does not train layers.0.bias, and the first one did"),
        (
            "written_on_the_way",
            "layers.0.weight was written between the update of the optimizer and the arrival of its",
        ),
        (
            "different_on_ranks",
            "the ranks made different optimizers: clip is 1.0 on rank 0 and 2.0 on rank 1",
        ),
    ],
)
def test_every_rank_ends_with_one_line(fault: str, message: str, pool: Pool) -> None:
    for outcome in pool.outcomes(failing, fault, ranks=2):
        assert message in outcome.text
        assert "\n" not in outcome.text
