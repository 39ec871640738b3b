"""Rows of a sharded vocabulary as parameters: replicas, clipping, checkpoints, models on the meta
device."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbcompile
from gpt import GPT, next_byte_loss
from tests.support.oracle import Batch
from tests.support.pool import Pool
from tests.support.vocabulary_training import distance

MICROBATCHES = 4
Seen = dict[str, Any]


def batch_of(rows: int) -> Batch:
    tokens = torch.randint(0, 256, (rows, 9), generator=torch.Generator().manual_seed(1))
    return Batch((tokens[:, :-1].contiguous(),), {}, tokens[:, 1:].contiguous())


def fill(name: str, tensor: Tensor) -> None:
    tensor.normal_(std=0.2)


def on_meta(folder: str) -> Seen:
    """A model on the meta device, one layer on the first rank and two on the second; saved, changed
    and restored."""
    with torch.device("meta"):
        model = tall()
    options: Any = {
        "schedule": "1f1b",
        "microbatches": MICROBATCHES,
        "loss": next_byte_loss,
        "init": fill,
    }
    options["ranks"] = None if dist.is_initialized() else 2
    pipe = zbcompile.pipeline(model, vocab=1, balance=["blocks.1"], **options)
    batch = batch_of(2 * MICROBATCHES)
    loss = pipe.step(*batch.args, target=batch.target)
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    before, optimizer = copied(pipe.state_dict(full=True)), sgd(pipe.parameters())
    optimizer.step()
    trained = copied(pipe.state_dict(full=True))
    zbcompile.save_checkpoint(folder, pipe, optimizer)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.add_(1.0)
    zbcompile.load_checkpoint(folder, pipe, optimizer)
    assert pipe.program.vocabulary is not None
    words = [high - low for low, high in pipe.program.vocabulary.bounds]
    real = {name for name, p in model.named_parameters() if not p.is_meta}
    seen: Seen = {
        "loss": loss,
        "gradients": gradients,
        "before": before,
        "trained": trained,
        "words": words,
    }
    return seen | {
        "real": real,
        "restored": pipe.state_dict(full=True),
        "output": pipe.eval(*batch.args, microbatches=1),
    }


def copied(state: dict[str, Any]) -> dict[str, Tensor]:
    """Returns copies of a state dict: as eager's, it shows the parameters themselves."""
    return {name: tensor.clone() for name, tensor in state.items()}


def tall() -> nn.Module:
    return GPT(layers=3, width=16, heads=2, length=8)


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.slow
def test_a_rank_makes_its_own_rows_real(pool: Pool, tmp_path: Path) -> None:
    """Only a rank's rows get memory, with the values that the whole parameter would have; gradients
    are those of one process with all ranks, and a checkpoint puts the rows together again."""
    alone = pool.alone(on_meta, str(tmp_path / "alone"))
    seen = pool.run(on_meta, str(tmp_path / "ranks"))
    assert alone["words"] == seen[0]["words"] == seen[1]["words"]
    for item in seen:
        assert not {"head.weight", "token.weight"} & item["real"]
        assert distance(item["loss"], alone["loss"]) < 1e-6
        assert distance(item["output"], alone["output"]) < 1e-5
        for key, value in alone["before"].items():
            assert torch.equal(item["before"][key], value), key
            assert torch.equal(item["restored"][key], item["trained"][key]), key
    joined = {}
    for name, gradient in alone["gradients"].items():
        parts = [item["gradients"][name] for item in seen if name in item["gradients"]]
        joined[name] = torch.cat(parts) if len(parts) == 2 else parts[0]
        assert distance(joined[name], gradient) < 1e-6, name
    model = tall()
    optimizer = sgd(model.parameters())
    zbcompile.load_checkpoint(tmp_path / "ranks", model, optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, seen[0]["trained"][name]), name
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], joined[name]), name
