"""Losses and gradients of a sharded output layer in fp64, fp32 and bf16: every loss, logits of all kinds, one to eight
shards of a vocabulary that they divide badly or that is smaller than they are many, both algorithms, kept and lean."""

from functools import cache

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.support.generated import examples
from tests.support.vocabulary_case import LOSSES, Made, Model, eager, far, head_of, hidden_of, problem, sharded
from zbcompile.passes.graph.roles import Slot
from zbcompile.passes.vocabulary.output_layer import VocabularyHead
from zbcompile.passes.vocabulary.shard import Shard
from zbcompile.passes.vocabulary.shard_program import even_bounds

KINDS = ("random", "1e4", "all equal", "one confident", "all ignored")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
Labels = Tensor
WORDS = 7  # no number of shards but 1 and 7 divides it, and 8 are more


def logits_of(kind: str, hidden: Tensor, model: Model, labels: Labels) -> None:
    """Change the problem so that its logits are of this kind."""
    with torch.no_grad():
        if kind == "1e4":
            model.head.weight *= 2e4
        elif kind == "all equal":
            model.head.weight.zero_()
            model.head.bias.fill_(3.0)
        elif kind == "one confident":
            hidden[0, 0] = 40 * model.head.weight[2] / model.head.weight[2].square().sum()
            labels[0, 0] = 2
        elif kind == "all ignored":
            labels.fill_(-100)


@cache
def found_head(name: str, dtype: torch.dtype) -> tuple[VocabularyHead, dict[Slot, Tensor]]:
    """Recognition depends on the form of the problem alone; beside the head what it reads."""
    model, x, labels = problem(dtype, WORDS)
    return head_of(model, x, labels, LOSSES[name])


def same_in(dtype: torch.dtype, model: Model) -> Model:
    """A copy of the model in another precision."""
    other = Model(WORDS).to(dtype)
    other.load_state_dict(model.state_dict())
    return other


def worse(ours: Made, own: Made, reference: Made, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Errors beyond what is allowed, relative to the largest entry of the reference (absolute where that is 0).

    fp64: 1e-12. fp32: 2e-6, or twice the unsplit model's own error against fp64. bf16: the unsplit model's own error,
    and a quarter of a unit in the last place for the sum that is rounded elsewhere.
    """
    found = {}
    for name, value in reference.named().items():
        if value.isnan().any():
            continue
        scale = value.abs().max().item() or 1.0
        error, base = ((each.named()[name].double() - value).abs().max().item() / scale for each in (ours, own))
        allowed = {torch.float64: 1e-12, torch.float32: max(2e-6, 2 * base), torch.bfloat16: 1.1 * base + 1e-3}[dtype]
        if not error <= allowed:
            found[name] = (error, allowed)
    return found


@pytest.mark.slow
@examples(12)
@given(
    name=st.sampled_from(sorted(LOSSES)),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    p=st.integers(1, 8),
    barriers=st.sampled_from((1, 2)),
    lean=st.booleans(),
)
def test_no_worse_than_unsplit(name: str, kind: str, dtype: torch.dtype, p: int, barriers: int, lean: bool) -> None:
    double, x, labels = problem(torch.float64, WORDS)
    hidden = hidden_of(double, x)
    logits_of(kind, hidden, double, labels)
    model, hidden = same_in(dtype, double), hidden.to(dtype)
    exact = same_in(torch.float64, model)
    reference = eager(exact, hidden.double(), labels, LOSSES[name])
    own = eager(model, hidden, labels, LOSSES[name])
    head, values = found_head(name, dtype)
    values = {slot: labels if slot.name == "target" else value for slot, value in values.items()}
    ours = sharded(head, values, model, hidden, p, barriers, lean)
    assert reference.loss.isnan() == ours.loss.isnan()  # a mean of nothing
    assert not worse(ours, own, reference, dtype)


@pytest.mark.parametrize("barriers", [1, 2])
def test_all_tokens_ignored(barriers: int) -> None:
    """torch: a loss of NaN, gradients of exactly 0."""
    model, x, labels = problem()
    labels = torch.full_like(labels, -100)
    head, values = head_of(model, x, labels, LOSSES["mean"])
    ours = sharded(head, values, model, hidden_of(model, x), 3, barriers, False)
    assert ours.loss.isnan()
    assert not any(value.any() or value.isnan().any() for name, value in ours.named().items() if name != "loss")


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("lean", [False, True])
def test_a_shard_of_masked_words(barriers: int, lean: bool) -> None:
    """Words that pad the vocabulary, their logits -inf: one shard may have no others."""
    model, x, labels = problem()
    with torch.no_grad():
        model.head.bias[-4:] = -torch.inf
    labels = labels.clamp(max=6)
    hidden = hidden_of(model, x)
    head, values = head_of(model, x, labels, LOSSES["mean"])
    ours = sharded(head, values, model, hidden, 3, barriers, lean)
    assert not far(ours, eager(model, hidden, labels, LOSSES["mean"]), 1e-12)


@pytest.mark.parametrize(
    ("name", "dtype", "lean", "expected"),
    [
        ("mean", torch.float32, False, True),
        ("z-loss", torch.float64, False, True),
        ("mean", torch.float32, True, False),  # nothing waits
        ("mean", torch.bfloat16, False, False),  # would wait in fp32, twice the size of logits
        ("smoothing", torch.float32, False, False),  # the gradient is no multiple of the softmax
        ("soft cap and smoothing", torch.float32, False, False),
    ],
)
def test_exponentials_wait_where_the_gradient_is_a_multiple(
    name: str, dtype: torch.dtype, lean: bool, expected: bool
) -> None:
    head, _ = found_head(name, dtype)
    shard = Shard(head, 0, even_bounds(head.size, 2), 1, not lean, 3)
    assert shard.keeps_exponentials == expected
