"""A model in a pipeline of several processes: tensors of other ranks are on the meta device, and all
else works as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

import zbcompile
from tests.support.dtensor_models import LENGTH, Llama, loss_of, parallelised
from tests.support.meshes import mesh_of
from tests.support.oracle import WIDTH
from tests.support.pool import Pool

ROWS = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)), nn.BatchNorm1d(WIDTH))


def pipe_of(model: nn.Module, cut: str) -> zbcompile.Pipeline:
    options: dict[str, Any] = {"schedule": "1f1b", "ranks": 2, "microbatches": 2, "exact": True}
    return zbcompile.pipeline(model, loss=F.mse_loss, balance=[cut], **options)


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return ""


def reads_and_second_pipeline() -> tuple[dict[str, str], set[str], str, Tensor]:
    """Returns the errors of reading the model in this process, the names of the tensors that are on
    the meta device; and of a second pipeline of the model, cut elsewhere, without and with the
    weights of the first one, the error and the loss."""
    model = net()
    pipe = pipe_of(model, "1")
    pipe.step(ROWS, target=ROWS)
    reads = {
        "state_dict": model.state_dict,
        "forward": lambda: model(ROWS),
        "copied": lambda: [torch.empty(p.shape).copy_(p) for p in model.parameters()],
        "clipping": lambda: clip_grad_norm_(model.parameters(), 1.0),
        "clipping its own": lambda: clip_grad_norm_([*pipe.parameters()], 1.0),
    }
    said = {name: said_by(read) for name, read in reads.items()}
    clip_grads_with_norm_(pipe.parameters(), 1.0, torch.ones(()))
    tensors = (*model.named_parameters(), *model.named_buffers())
    remote = {name for name, tensor in tensors if tensor.is_meta}
    assert remote.isdisjoint(name for name, _ in pipe.named_parameters())
    weights = pipe.state_dict(full=True)
    pipe.close()
    second = pipe_of(model, "3").compile(ROWS, target=ROWS)
    message = said_by(second._binding.share.require_filled)
    second.load_state_dict(weights)
    loss = second.step(ROWS, target=ROWS)
    second.close()
    return said, remote, message, loss


@pytest.mark.slow
def test_tensors_of_other_ranks_are_on_the_meta_device(pool: Pool) -> None:
    """torch refuses to read them; a state dict and clipping say what to call. A second pipeline
    does not start from old values."""
    both = pool.run(reads_and_second_pipeline)
    alone = reads_and_second_pipeline()[-1]
    for said, _, _, loss in both:
        assert "this process holds the parameters and buffers of stage" in said["state_dict"]
        assert "pipe.state_dict(full=True)" in said["state_dict"]
        assert "Call pipe.clip_grad_norm_(max_norm)" in said["clipping"]
        assert "Call pipe.clip_grad_norm_(max_norm)" in said["clipping its own"]
        assert said["forward"]
        assert said["copied"]
        assert torch.equal(loss, alone)
    assert any(
        "on another rank of an earlier pipeline), and not filled" in m for _, _, m, _ in both
    )
    first, second = (remote for _, remote, _, _ in both)
    assert first.isdisjoint(second)
    assert first | second == {n for n, _ in (*net().named_parameters(), *net().named_buffers())}


def parallel_state() -> None:
    """The state dict of a model with DTensors in a pipeline has eager's, in both directions."""
    mesh = mesh_of(tp=dist.get_world_size())
    eager, model = (parallelised(mesh["tp"], "plain", 1) for _ in range(2))
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", microbatches=2, loss=loss_of)
    x, y = torch.zeros(2, 4, LENGTH, dtype=torch.int64).unbind()
    pipe.step(x, target=y)
    displayed, expected = get_model_state_dict(model), get_model_state_dict(eager)
    for name, value in expected.items():
        assert isinstance(displayed[name], DTensor) == isinstance(value, DTensor), name
        assert torch.equal(whole(displayed[name]), whole(value)), name
    set_model_state_dict(model, {name: value * 2 for name, value in expected.items()})
    results = pipe.state_dict(full=True)
    assert all(torch.equal(whole(results[n]), 2 * whole(value)) for n, value in expected.items())
    model.load_state_dict(Llama(1).state_dict())
    again = model.state_dict()
    assert all(torch.equal(whole(again[name]), whole(expected[name])) for name in expected)
    with pytest.raises(zbcompile.PipelineError, match="differs from rank to rank"):  # plain parts
        clip_grad_norm_(model.parameters(), 1.0)
    clip_grad_norm_([item for item in pipe.parameters() if isinstance(item, DTensor)], 1.0)
    pipe.close()


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.slow
@pytest.mark.beyond_sample
def test_state_dicts_of_a_parallelised_model_have_its_dtensors(pool: Pool) -> None:
    pool.run(parallel_state)
