"""A sharded output layer in a loss of several terms: heads that share it, and numbers that are no
logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile

WORDS, WIDTH = 24, 8


class TwoHeads(nn.Module):
    """Predicts the next word and the one after it by one output layer; `gate` gets its gradient
    from a number alone."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.gate = nn.Parameter(torch.tensor([1.7, -0.3], dtype=torch.float32))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, balance = self.embedding(tokens[:, :-2]), torch.zeros(())
        for number, block in enumerate(self.blocks):
            hidden = torch.tanh(block(hidden))
            if number % 2:
                balance = balance + hidden.float().square().mean()
        first = F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:-1].flatten())
        further = F.cross_entropy(
            self.head(hidden.sin()[:, :-1]).flatten(0, 1), tokens[:, 2:-1].flatten()
        )
        return first + 0.3 * further + 0.01 * balance + (self.gate * 3).sum()


MICROBATCHES = 5  # a fifth has more digits than bfloat16


def case(dtype: torch.dtype, bias: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = TwoHeads(bias).to(dtype)
    model.gate.data = model.gate.data.float()
    return model, torch.randint(
        WORDS, (2 * MICROBATCHES, 9), generator=torch.Generator().manual_seed(1)
    )


def worst(
    vocab: int, schedule: str, dtype: torch.dtype, bias: bool, ranks: int | None = 2
) -> dict[str, float]:
    """How far the step is from eager: its loss, and the gradient of every parameter."""
    model, tokens = case(dtype, bias)
    losses = [model(part) / MICROBATCHES for part in tokens.chunk(MICROBATCHES)]
    torch.stack(losses).sum().backward()
    pipe = zbcompile.pipeline(
        case(dtype, bias)[0], schedule=schedule, ranks=ranks, microbatches=MICROBATCHES, vocab=vocab
    )
    results = {"loss": abs(pipe.step(tokens).item() / sum(loss.item() for loss in losses) - 1)}
    shards = pipe.program.vocabulary
    assert shards is not None
    for name, parameter in pipe.named_parameters():
        expected, local = model.get_parameter(name).grad, parameter.grad
        assert expected is not None
        assert local is not None
        if ranks is None and name in shards.parameters:
            expected = expected[slice(*shards.bounds[torch.distributed.get_rank()])]
        results[name] = float((local - expected).abs().max() / expected.abs().max())
    return results


@pytest.mark.slow
@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize(
    ("vocab", "schedule", "bias"),
    [(1, "zb-h1", False), (2, "zb-v", True), (1, "dualpipe-v", False)],
)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
def test_terms_of_the_loss(
    vocab: int, schedule: str, bias: bool, dtype: torch.dtype, bound: float
) -> None:
    """A float32 term keeps its digits next to an output layer in bfloat16, and so does its
    gradient."""
    results = worst(vocab, schedule, dtype, bias)
    assert results["gate"] <= 1e-6
    assert results["loss"] <= max(1e-6, bound / 10)
    assert max(results.values()) <= bound


@pytest.mark.slow
def test_evaluation_has_all_terms() -> None:
    model, tokens = case(torch.float32)
    eager = sum(model(part).item() for part in tokens.chunk(MICROBATCHES)) / MICROBATCHES
    pipe = zbcompile.pipeline(model, schedule="zb-h1", ranks=2, microbatches=MICROBATCHES, vocab=1)
    pipe.step(tokens)
    assert pipe.eval(tokens).item() == pytest.approx(eager, rel=1e-6)
