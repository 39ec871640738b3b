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
from tests.support.dtensor_models import LENGTH, VOCABULARY, Llama, loss_of, parallelised
from tests.support.meshes import mesh_of
from tests.support.oracle import WIDTH, optimizer_of
from tests.support.pool import Pool

ROWS = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)


class Net(nn.Module):
    """A layer, a body that may be shared, with buffers, and a layer."""

    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.front = nn.Linear(WIDTH, WIDTH)
        self.body = body or nn.Sequential(
            *[nn.Linear(WIDTH, WIDTH) for _ in range(4)], nn.BatchNorm1d(WIDTH)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.front(x)))  # type: ignore[no-any-return]


def pipe_of(model: nn.Module, **options: Any) -> zbcompile.Pipeline:
    options = {
        "schedule": "1f1b",
        "ranks": 2,
        "microbatches": 2,
        "loss": F.mse_loss,
        "exact": True,
    } | options
    return zbcompile.pipeline(model, **options)


def trained(
    model: nn.Module, steps: int = 2, **options: Any
) -> tuple[zbcompile.Pipeline, list[Tensor]]:
    pipe, losses = pipe_of(model, **options), []
    optimizer = optimizer_of(pipe.compile(ROWS, target=ROWS).parameters())
    for _ in range(steps):
        losses.append(pipe.step(ROWS, target=ROWS))
        optimizer.step()
        optimizer.zero_grad()
    return pipe, losses


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return ""


def refusals() -> tuple[dict[str, str], bool, set[str]]:
    """Returns the errors of reading the model in this process, whether clipping its own parameters is refused,
    and the names of the tensors that are on the meta device."""
    model = Net()
    pipe, _ = trained(model)
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
    local = {name for name, _ in pipe.named_parameters()}
    tensors = (*model.named_parameters(), *model.named_buffers())
    remote = {name for name, tensor in tensors if tensor.is_meta}
    pipe.close()
    return said, local.isdisjoint(remote), remote


def test_tensors_of_other_ranks_are_on_the_meta_device(pool: Pool) -> None:
    """torch refuses to read them; a state dict and clipping say what to call."""
    both = pool.run(refusals)
    for said, disjoint, _ in both:
        assert "this process holds the parameters and buffers of stage" in said["state_dict"]
        assert "pipe.state_dict(full=True)" in said["state_dict"]
        assert "Call pipe.clip_grad_norm_(max_norm)" in said["clipping"]
        assert "Call pipe.clip_grad_norm_(max_norm)" in said["clipping its own"]
        assert said["forward"]
        assert said["copied"]
        assert disjoint
    (_, _, first), (_, _, second) = both
    assert first.isdisjoint(second)
    names = {name for name, _ in (*Net().named_parameters(), *Net().named_buffers())}
    assert first | second == names


def one_after_the_other() -> tuple[str, Tensor]:
    """A second pipeline of the model, cut elsewhere, without and with the weights of the
    first one."""
    model = Net()
    pipe, _ = trained(model, balance=["body.1"])
    weights = pipe.state_dict(full=True)
    pipe.close()
    second = pipe_of(model, balance=["body.3"]).compile(ROWS, target=ROWS)
    message = said_by(second._binding.share.require_filled)
    second.load_state_dict(weights)
    loss = second.step(ROWS, target=ROWS)
    second.close()
    return message, loss


@pytest.mark.slow
def test_a_second_pipeline_does_not_start_from_old_values(pool: Pool) -> None:
    _, loss = one_after_the_other()
    both = pool.run(one_after_the_other)
    assert "on another rank of an earlier pipeline), and not filled" in " ".join(
        message for message, _ in both
    )
    assert all(torch.equal(theirs, loss) for _, theirs in both)


def parallel_state() -> tuple[set[str], bool, bool, bool]:
    """Returns, for a model with DTensors in a pipeline, which names of torch's state dict are DTensors here
    and not in the eager one, or vice versa; whether values are the same; whether what torch loads
    arrives."""
    mesh = mesh_of(tp=dist.get_world_size())
    eager, model = parallelised(mesh["tp"], "plain", 1), parallelised(mesh["tp"], "plain", 1)
    pipe = zbcompile.pipeline(model, mesh=mesh, schedule="1f1b", microbatches=2, loss=loss_of)
    torch.manual_seed(1)
    x, y = torch.randint(VOCABULARY, (2, 4, LENGTH)).unbind()
    pipe.step(x, target=y)
    displayed, expected = get_model_state_dict(model), get_model_state_dict(eager)
    unlike = {
        name
        for name, value in displayed.items()
        if isinstance(value, DTensor) != isinstance(expected[name], DTensor)
    }
    same = all(torch.equal(whole(displayed[name]), whole(expected[name])) for name in expected)
    set_model_state_dict(model, {name: value * 2 for name, value in expected.items()})
    results = pipe.state_dict(full=True)
    doubled = all(torch.equal(whole(results[name]), 2 * whole(expected[name])) for name in expected)
    model.load_state_dict(Llama(1).state_dict())
    again = all(
        torch.equal(whole(value), whole(expected[name]))
        for name, value in model.state_dict().items()
    )
    with pytest.raises(
        zbcompile.PipelineError, match=r"differs from rank to rank"
    ):  # plain parts of DTensors
        clip_grad_norm_(model.parameters(), 1.0)
    clip_grad_norm_([item for item in pipe.parameters() if isinstance(item, DTensor)], 1.0)
    pipe.close()
    return unlike, same, doubled, again


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.slow
def test_state_dicts_of_a_parallelised_model_have_its_dtensors(pool: Pool) -> None:
    for unlike, same, doubled, again in pool.run(parallel_state):
        assert not unlike
        assert same
        assert doubled
        assert again
