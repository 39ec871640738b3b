"""A sharded output layer in a loss of several terms: heads that share it, and numbers that are no
logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile

WORDS, WIDTH = 24, 8
MICROBATCHES = 5  # a fifth has more digits than bfloat16


class TwoHeads(nn.Module):
    """Predicts the next word and the one after it by one output layer; `gate` gets its gradient
    from a number alone."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=bias)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate = nn.Parameter(torch.tensor([1.7, -0.3]))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, balance = self.embedding(tokens[:, :-2]), torch.zeros(())
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
            balance = balance + hidden.float().square().mean()
        logits, later = self.head(hidden), self.head(hidden.sin()[:, :-1])
        first = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:-1].flatten())
        further = F.cross_entropy(later.flatten(0, 1), tokens[:, 2:-1].flatten())
        return first + 0.3 * further + 0.01 * balance + (self.gate * 3).sum()


@pytest.mark.slow
@pytest.mark.mostly_slow(every=6, suite=3)
@pytest.mark.parametrize(
    ("vocab", "schedule", "bias"),
    [(1, "zb-h1", False), (2, "zb-v", True), (1, "dualpipe-v", False)],
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_terms_of_the_loss(
    vocab: int, schedule: str, bias: bool, dtype: torch.dtype, bound: float
) -> None:
    """A float32 term keeps its digits next to an output layer in bfloat16, and so does its
    gradient. An evaluation has all terms."""
    model, ours = (TwoHeads(bias).to(dtype) for _ in range(2))
    for item in (model, ours):
        item.gate.data = item.gate.data.float()
    tokens = torch.randint(WORDS, (2 * MICROBATCHES, 9))
    expected = torch.stack(
        [model(part) / MICROBATCHES for part in tokens.chunk(MICROBATCHES)]
    ).sum()
    expected.backward()
    options = {"schedule": schedule, "ranks": 2, "microbatches": MICROBATCHES, "vocab": vocab}
    pipe = zbcompile.pipeline(ours, **options)
    loss = pipe.step(tokens)
    assert loss.item() == pytest.approx(expected.item(), rel=max(1e-6, bound / 10))
    assert pipe.eval(tokens).item() == pytest.approx(expected.item(), rel=max(1e-6, bound / 10))
    for name, parameter in pipe.named_parameters():
        full = model.get_parameter(name).grad
        limit = 1e-6 if name == "gate" else bound
        assert (parameter.grad - full).abs().max() <= limit * full.abs().max(), name  # type: ignore[operator,union-attr]
