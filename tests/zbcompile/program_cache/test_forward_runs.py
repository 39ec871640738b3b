"""A forward-only run is a run like any other: recorded, predicted, in any mode and number of
microbatches. It leaves nothing behind in what trains."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.live_storages import Alive, forward_bytes
from tests.support.training import assert_same_tensors

WIDTH = 8


class Layers(nn.Module):
    """Dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return self.norm(x)


def batch_of(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def made() -> zbcompile.Pipeline:
    pipe = zbcompile.pipeline(
        Layers(), schedule="zb-v", microbatches=4, ranks=2, loss=F.mse_loss, exact=True
    )
    return pipe.compile(batch_of(8), target=batch_of(8))


@pytest.fixture(scope="module")
def pipe() -> zbcompile.Pipeline:
    return made()


@pytest.mark.parametrize("count", [1, 8])
def test_what_is_predicted_is_alive(pipe: zbcompile.Pipeline, count: int) -> None:
    """One microbatch in one stage next to messages and outputs, however many microbatches
    there are."""
    x = batch_of(8)
    pipe.eval(x, microbatches=count)
    with Alive([], [*pipe._model.parameters(), *pipe._model.buffers(), x]) as alive:
        pipe.eval(x, microbatches=count)
    inside, extra = forward_bytes(list(pipe._compiled.evaluations.plans.values())[-1].program)
    assert inside <= alive.most <= inside + extra


def test_step_eval_step_has_the_bits_of_step_step() -> None:
    one, second, x = made(), made(), batch_of(8)
    for pipe in (one, second):
        for _ in range(2):
            pipe.step(x, target=x)
            if pipe is one:
                pipe.eval(x)
    assert_same_tensors(
        {n: p.grad for n, p in one.named_parameters()}, dict(grads(second)), "gradient of"
    )
    assert_same_tensors(one.state_dict(), second.state_dict(), "state dict:")


def grads(pipe: zbcompile.Pipeline) -> list[tuple[str, Tensor | None]]:
    return [(name, parameter.grad) for name, parameter in pipe.named_parameters()]


def test_the_state_dict_as_a_stream(pipe: zbcompile.Pipeline) -> None:
    assert_same_tensors(dict(pipe.stream_state_dict()), pipe.state_dict(full=True), "state dict:")


def test_split_microbatches_of_any_shape(pipe: zbcompile.Pipeline) -> None:
    parts, model = [batch_of(rows) for rows in (3, 1, 3)], Layers().eval()
    outputs = pipe.eval(microbatches=[((part,), {}) for part in parts])
    for output, part in zip(outputs, parts, strict=True):
        assert torch.equal(output, model(part).detach())
