"""Autocast around a step: dropout is scaled in the low precision, forward and backward, as eager's
kernels do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import Batch, microbatch_loss
from tests.support.training import assert_same_tensors, gradients_of

WIDTH = 8


class PartlyUncast(nn.Module):
    """Attention with dropout, and a linear layer that opts out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.plain, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.dropout(mixed, 0.2)
        with torch.autocast("cpu", enabled=False):
            x = self.plain(x.float())
        return F.dropout(self.head(x), 0.2)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


@pytest.mark.slow
@pytest.mark.filterwarnings("error:warm-up")  # attention saves float32, fake tensors say bfloat16
def test_autocast_is_that_of_each_step() -> None:
    """A step inside autocast and one outside are two programs, with the bits of eager, whose
    backward stands outside, as torch recommends."""
    torch.manual_seed(0)
    model = PartlyUncast()
    eager, x = copy.deepcopy(model), torch.arange(16).view(4, 4)
    options = {"schedule": "zb-h1", "ranks": 2, "microbatches": 2, "exact": True}
    pipe = zbcompile.pipeline(model, loss=loss_of, **options)
    for step, enabled in enumerate((False, True, False)):
        expected = torch.tensor(0.0)
        for i, part in enumerate(Batch((x,), {}, x).parts(2)):
            torch.manual_seed(zbcompile.microbatch_seed(step, i))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                scaled = microbatch_loss(eager, loss_of, part) / 2
            scaled.backward()
            expected = expected + scaled.detach()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            assert torch.equal(pipe.step(x, target=x), expected)
        assert_same_tensors(gradients_of(pipe), gradients_of(eager), "gradient of")
