"""The loop by Lightning next to eager's, in one process."""

import pytest
import torch
from torch.nn.functional import cross_entropy

pytest.importorskip("lightning")

import lightning_loop as loop


def eager() -> list[float]:
    """The losses of an epoch."""
    losses, net = [], loop.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=loop.LEARNING_RATE)
    for inputs, target in loop.loader(0):
        losses.append(torch.zeros(()))
        parts = inputs.chunk(loop.MICROBATCHES), target.chunk(loop.MICROBATCHES)
        for x, y in zip(*parts, strict=True):
            loss = cross_entropy(net(x), y) / loop.MICROBATCHES
            loss.backward()
            losses[-1] = losses[-1] + loss.detach()
        torch.nn.utils.clip_grad_norm_(net.parameters(), loop.CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


@pytest.mark.slow
def test_the_losses_of_eager() -> None:
    """Bit for bit, with exact=True."""
    assert loop.train(ranks=2) == eager()
