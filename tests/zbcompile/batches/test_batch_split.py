"""How inputs are cut into microbatches, against the rule in its plainest form."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import WIDTH
from tests.support.training import assert_same_tensors, gradients_of


class SequenceFirst(nn.Module):
    """Takes [length, batch, width], as `nn.Transformer` does by default, and a prompt with rows of
    its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        pairs = prompt.view(x.shape[1], 2, -1).sum(1)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + pairs
        return x


def made() -> SequenceFirst:
    torch.manual_seed(0)
    return SequenceFirst()


@pytest.mark.slow
def test_other_dimensions_and_lengths() -> None:
    """A batch along dimension 1 beside one with twice its rows: eager's bits, in `eval` too."""
    model, eager = made(), made()
    x, prompt, goal = torch.randn(3, 8, WIDTH), torch.randn(16, WIDTH), torch.randn(3, 8, WIDTH)
    split = {"args[0]": 1, "prompt": True, "target": 1}
    pipe = zbcompile.pipeline(
        model, schedule="zb-v", ranks=2, microbatches=4, loss=F.mse_loss, exact=True, split=split
    )
    loss = pipe.step(x, prompt=prompt, target=goal)
    total = torch.zeros(())
    for part, local, target in zip(x.chunk(4, 1), prompt.chunk(4), goal.chunk(4, 1), strict=True):
        scaled = F.mse_loss(eager(part, local), target) / 4
        scaled.backward()
        total = total + scaled.detach()
    assert torch.equal(loss, total)
    assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")
    assert torch.equal(pipe.eval(x, prompt=prompt), eager(x, prompt))


@pytest.mark.slow
def test_an_evaluation_lacks_labels() -> None:
    """`split=` may name inputs that a step alone has."""
    pipe = zbcompile.pipeline(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))),
        schedule="1f1b",
        ranks=2,
        microbatches=4,
        loss=F.mse_loss,
        split={"target": True},
    )
    pipe.step(torch.randn(8, WIDTH), target=torch.randn(8, WIDTH))
    assert pipe.eval(torch.randn(8, WIDTH)).shape == (8, WIDTH)
