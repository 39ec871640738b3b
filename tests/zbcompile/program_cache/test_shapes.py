"""Batches of other sizes: a program per shape, a bounded number of them, every parameter where it
was."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.support.oracle import WIDTH
from tests.support.training import AsEager


class Sequences(nn.Module):
    """A value that three nodes read, the second without parameters; long sequences have one
    operation more; a shape is computed from the input's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x + torch.arange(x.shape[1]).unsqueeze(-1) / x.shape[1]))
        built = x + self.second(x) * (3 * x).sin()
        return built.cos() if x.shape[1] > 3 else built


def sequences(size: int, length: int) -> Tensor:
    return torch.randn(size, length, WIDTH, generator=torch.Generator().manual_seed(size + length))


@pytest.mark.slow
def test_a_bounded_number_of_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """The least recently used one is evicted, but never the first, and comes back when it is asked
    for; nothing else of it stays in memory. A program with other operations than the first is
    placed by its parameters, and adds the gradients of a value in eager's order."""
    options = {"schedule": "zb-h1", "ranks": 2, "max_shapes": 2, "balance": ["tanh"]}
    compared, allocated = AsEager(Sequences(), 2, **options), []
    for size, length in ((4, 3), (4, 5), (2, 5), (4, 3), (4, 5)):
        compared.step(sequences(size, length), target=sequences(size, length))
        entries = compared.pipe._compiled.steps.entries
        allocated.append([weakref.ref(entry.graphs[0].program) for entry in entries])
    gc.collect()
    assert [len(programs) for programs in allocated] == [1, 2, 2, 2, 2]
    dropped = [item for programs in allocated for item in programs if item not in allocated[-1]]
    assert dropped
    assert all(program() is None for program in dropped)
    assert allocated[0][0]() is compared.pipe.program
    out = capsys.readouterr().out
    assert out.count("compiling again for microbatches of args[0][2, 5, 32]") == 2
    assert out.count("evicted the least recently used program; max_shapes=2") == 2
    for length in (2, 3, 4):
        compared.pipe.eval(sequences(4, length))
    assert len(compared.pipe._compiled.evaluations.entries) == 2
