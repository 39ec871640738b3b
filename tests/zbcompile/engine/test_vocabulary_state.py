"""Rows of a sharded vocabulary as parameters: replicas, clipping, checkpoints, models on the meta
device."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zbcompile
from gpt import GPT, next_byte_loss
from tests.support.oracle import Batch, eager_step
from tests.support.pool import Pool
from tests.support.vocabulary_training import distance

MICROBATCHES, REPLICAS, MOST = 4, 2, 0.05
OPTIONS: Any = {
    "schedule": "zb-h1",
    "microbatches": MICROBATCHES,
    "loss": next_byte_loss,
    "vocab": 1,
}
Seen = dict[str, Any]


def small(tied: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(layers=1, width=16, heads=2, length=8, tied=tied).double()


def batch_of(rows: int) -> Batch:
    tokens = torch.randint(0, 256, (rows, 9), generator=torch.Generator().manual_seed(1))
    return Batch((tokens[:, :-1].contiguous(),), {}, tokens[:, 1:].contiguous())


def replica(folder: str) -> Seen:
    """One step of a tied model on this replica's half of the batch; gradients are clipped, a
    checkpoint is written."""
    mesh = init_device_mesh("cpu", (REPLICAS, 2), mesh_dim_names=("dp", "pp"))
    own = list(batch_of(2 * REPLICAS * MICROBATCHES).parts(REPLICAS))[mesh["dp"].get_local_rank()]
    pipe = zbcompile.pipeline(small(tied=True), mesh=mesh, **OPTIONS)
    loss = pipe.step(*own.args, target=own.target)
    norm = pipe.clip_grad_norm_(MOST)
    gradients = {name: p.grad for name, p in pipe.named_parameters()}
    dcp.save(pipe.state_dict(), checkpoint_id=folder)
    seen = {"loss": loss, "norm": norm, "gradients": gradients, "full": pipe.state_dict(full=True)}
    return seen | {"output": pipe.eval(*own.args, microbatches=1)}


@pytest.mark.beyond_sample
@pytest.mark.slow
def test_replicas_clipping_and_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """Losses, the norm (each row counted once) and clipped gradients are those of one process on
    the whole batch; what the ranks wrote is put together under eager's keys; each replica evaluates
    its own half."""
    seen = pool.run(replica, str(tmp_path), ranks=4)
    model, batch = small(tied=True), batch_of(2 * REPLICAS * MICROBATCHES)
    loss = eager_step(model, next_byte_loss, batch, REPLICAS * MICROBATCHES, 0)
    norm = nn.utils.clip_grad_norm_(model.parameters(), MOST)
    assert all(distance(each["loss"], loss) < 1e-12 for each in seen)
    assert all(
        distance(each["norm"], norm) < 1e-6 for each in seen
    )  # the norms of parts travel in fp32
    with torch.no_grad():
        outputs = [model(*half.args) for half in batch.parts(REPLICAS)]
    assert all(distance(each["output"], outputs[i // 2]) < 1e-12 for i, each in enumerate(seen))
    for name, parameter in model.named_parameters():
        parts = [each["gradients"][name] for each in seen[:2] if name in each["gradients"]]
        whole = torch.cat(parts) if name == "token.weight" else parts[0]
        assert distance(whole, parameter.grad) < 1e-6, name
        twins = [each["gradients"][name] for each in seen[2:] if name in each["gradients"]]
        assert all(torch.equal(one, other) for one, other in zip(parts, twins, strict=True)), name
    assert_holds(tmp_path, model.state_dict())
    assert all(
        torch.equal(each["full"][key], value)
        for each in seen
        for key, value in model.state_dict().items()
    )


def assert_holds(folder: Path, expected: dict[str, Tensor]) -> None:
    """One process reads whole tensors from what several have written."""
    found = {key: torch.zeros_like(value) for key, value in expected.items()}
    dcp.load(found, checkpoint_id=str(folder), no_dist=True)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


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
    """What a state dict holds now: as eager's, it shows the parameters themselves."""
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
    for each in seen:
        assert not {"head.weight", "token.weight"} & each["real"]
        assert distance(each["loss"], alone["loss"]) < 1e-6
        assert distance(each["output"], alone["output"]) < 1e-5
        for key, value in alone["before"].items():
            assert torch.equal(each["before"][key], value), key
            assert torch.equal(each["restored"][key], each["trained"][key]), key
    joined = {}
    for name, gradient in alone["gradients"].items():
        parts = [each["gradients"][name] for each in seen if name in each["gradients"]]
        joined[name] = torch.cat(parts) if len(parts) == 2 else parts[0]
        assert distance(joined[name], gradient) < 1e-6, name
    model = tall()
    optimizer = sgd(model.parameters())
    zbcompile.load_checkpoint(tmp_path / "ranks", model, optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, seen[0]["trained"][name]), name
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], joined[name]), name
