"""Batches of other sizes: a program per shape, a bounded number of them, every parameter where it
was."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import WIDTH, Batch, eager_step
from tests.support.training import assert_same_tensors, gradients_of


class Sequences(nn.Module):
    """Works on sequences of any length; one of its shapes is computed from the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.arange(x.shape[1]).unsqueeze(-1) / x.shape[1]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def sequences(size: int, length: int) -> Batch:
    torch.manual_seed(size + length)
    return Batch((torch.randn(size, length, WIDTH),), {}, torch.randn(size, length, WIDTH))


def made() -> Sequences:
    torch.manual_seed(0)
    return Sequences()


@pytest.mark.slow
def test_a_bounded_number_of_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """The least recently used one is evicted, but never the first, and comes back when it is asked
    for; nothing else of it stays in memory. Gradients are eager's throughout."""
    model, eager = made(), made()
    pipe = zbcompile.pipeline(
        model, schedule="zb-h1", ranks=2, microbatches=2, loss=F.mse_loss, exact=True, max_shapes=2
    )
    allocated = []
    for step, (size, length) in enumerate([(4, 5), (4, 3), (2, 5), (4, 5), (4, 3)]):
        batch = sequences(size, length)
        eager.zero_grad()
        model.zero_grad()
        assert torch.equal(
            pipe.step(*batch.args, target=batch.target),
            eager_step(eager, F.mse_loss, batch, 2, step),
        )
        assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")
        allocated.append(
            [weakref.ref(entry.graphs[0].program) for entry in pipe._compiled.steps.entries]
        )
    gc.collect()
    assert [len(programs) for programs in allocated] == [1, 2, 2, 2, 2]
    dropped = [
        program for programs in allocated for program in programs if program not in allocated[-1]
    ]
    assert dropped
    assert all(program() is None for program in dropped)
    assert allocated[0][0]() is pipe.program
    out = capsys.readouterr().out
    assert out.count("compiling again for microbatches of args[0][2, 3, 32]") == 2
    assert out.count("evicted the least recently used program; max_shapes=2") == 2


class Readers(nn.Module):
    """A value that three nodes read, the second without parameters; long sequences have one
    operation more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        weights, waves = self.second(x), (3 * x).sin()
        built = x + weights * waves
        return built.cos() if x.shape[1] > 3 else built


@pytest.mark.slow
def test_other_operations_add_gradients_in_order() -> None:
    """A program with other operations than the first, placed by its parameters: the middle reader
    stays behind the first one, so the gradients of the value are added as eager does."""
    torch.manual_seed(0)
    model = Readers()
    eager = copy.deepcopy(model)
    pipe = zbcompile.pipeline(
        model,
        schedule="zb-h1",
        ranks=2,
        microbatches=2,
        loss=F.mse_loss,
        exact=True,
        balance=["tanh"],
    )
    for length in (3, 5):
        batch = sequences(4, length)
        model.zero_grad()
        eager.zero_grad()
        assert torch.equal(
            pipe.step(*batch.args, target=batch.target), eager_step(eager, F.mse_loss, batch, 2, 0)
        )
        assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")


@pytest.mark.slow
def test_evaluations_are_bounded_too() -> None:
    pipe = zbcompile.pipeline(
        made(), schedule="1f1b", ranks=2, microbatches=2, loss=F.mse_loss, max_shapes=2
    )
    batch = sequences(4, 5)
    pipe.compile(*batch.args, target=batch.target)
    for length in (2, 3, 4):
        pipe.eval(*sequences(4, length).args)
    assert len(pipe._compiled.evaluations.entries) == 2
