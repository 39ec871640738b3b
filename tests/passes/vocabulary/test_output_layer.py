"""Vocabulary passes against the unsplit output layer in eager mode; what is recognised, what is refused."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.vocabulary_case import (
    LOSSES,
    WIDTH,
    Loss,
    Model,
    eager,
    far,
    head_of,
    hidden_of,
    problem,
    rows,
    sharded,
    shifted,
    z_loss,
)
from zbcompile.passes.capture.export import capture
from zbcompile.passes.pass_list.passes_in_order import canonicalise
from zbcompile.passes.vocabulary.logits import NotShardable
from zbcompile.passes.vocabulary.output_layer import find_head

ALL = tuple(product(range(1, 9), (1, 2), (False, True)))
FEW = ((1, 1, False), (2, 1, False), (3, 2, False), (5, 1, True), (8, 2, True), (16, 1, False))


@pytest.mark.mostly_slow(every=4, suite=2)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_in_fp64(name: str) -> None:
    """One to eight shards, uneven and (with 16) empty ones; both algorithms, kept and lean."""
    model, x, labels = problem()
    head, values = head_of(model, x, labels, LOSSES[name])
    hidden = hidden_of(model, x)
    expected = eager(model, hidden, labels, LOSSES[name])
    for p, barriers, lean in ALL if name in ("mean", "soft cap and smoothing") else FEW:
        assert not far(sharded(head, values, model, hidden, p, barriers, lean), expected, 1e-12), (p, barriers, lean)


def test_deterministic() -> None:
    model, x, labels = problem(torch.float32)
    head, values = head_of(model, x, labels, LOSSES["soft cap and smoothing"])
    one, other = (sharded(head, values, model, hidden_of(model, x), 5, 1, False).named() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


class Classifier(nn.Module):
    """An MLP as wide as the vocabulary in front of the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.narrow(F.gelu(self.wide(x))))


def test_an_mlp_as_wide_as_the_vocabulary_is_not_taken() -> None:
    head, _ = head_of(Classifier(), torch.randn(2, 5, WIDTH), torch.zeros(2, 5, dtype=torch.long), LOSSES["mean"])
    assert head.weight == "head.weight"
    assert str(head).startswith("head.weight [32, 8] + head.bias")


REFUSED: dict[str, tuple[Loss, str]] = {
    "no vocabulary": (lambda y, t: (y - 1).square().mean() + 0 * t.sum(), "all of them at once"),
    "entropy": (lambda y, t: (F.softmax(y, -1) * F.log_softmax(y, -1)).sum(), "all of them at once"),
    "two functions": (lambda y, t: shifted(torch.tanh(y), t) + z_loss(y, t), "before and after"),
    "different tokens": (lambda y, t: shifted(y, t) + torch.logsumexp(y, -1).mean(), "different tokens"),
    "different labels": (
        lambda y, t: F.cross_entropy(rows(y), t.flatten()) + F.cross_entropy(rows(y), 0 * t.flatten()),
        "different labels",
    ),
    "without labels": (lambda y, t: torch.logsumexp(y, -1).mean() + 0 * t.sum(), "no term of the loss has labels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_says_why(name: str) -> None:
    loss, reason = REFUSED[name]
    with pytest.raises(NotShardable, match=reason):
        head_of(Model(), torch.randn(2, 5, WIDTH), torch.zeros(2, 5, dtype=torch.long), loss)


class Weighted(Model):
    """Returns its own loss, each token's weighted by what the model makes of it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        labels = torch.zeros(10, dtype=torch.long)
        return (
            F.cross_entropy(rows(self.head(hidden)), labels, reduction="none") * rows(hidden).square().mean(1)
        ).sum()


def test_a_trained_value_of_every_token_is_refused() -> None:
    canonical = canonicalise(capture(Weighted(), (torch.randn(2, 5, WIDTH),), {}))
    with pytest.raises(NotShardable, match=r"trained, neither a logit nor a single number"):
        find_head(canonical)


class Balanced(Model):
    """With a term of the loss in float32, beside an output layer in another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        labels = torch.zeros(10, dtype=torch.long)
        return F.cross_entropy(rows(self.head(hidden)).float(), labels) + hidden.float().square().mean()


def test_a_wide_term_is_refused_beside_float16() -> None:
    """Its range is too small; bfloat16 has that of float32."""
    for dtype in (torch.bfloat16, torch.float16):
        canonical = canonicalise(capture(Balanced().to(dtype), (torch.randn(2, 5, WIDTH, dtype=dtype),), {}))
        if dtype == torch.bfloat16:
            assert find_head(canonical).terms == [torch.float32]
            continue
        with pytest.raises(NotShardable, match=r"in torch\.float32, but the layer is in torch\.float16"):
            find_head(canonical)
