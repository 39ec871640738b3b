"""A model after DeepSeek-V3, with losses on several stages and a router that is balanced without
gradients."""

from typing import Literal

import pytest
import torch

import zbcompile
from tests.support.deepseek import model_and_tokens
from tests.support.oracle import Batch, eager_step
from tests.support.training import gradients_of

MICROBATCHES = 4


@pytest.fixture(scope="module")
def eager() -> dict[str, torch.Tensor]:
    """Losses of two steps, gradients, and buffers: how many tokens each expert got, and the bias
    that follows."""
    model, tokens = model_and_tokens(2 * MICROBATCHES)
    losses = [
        eager_step(model, None, Batch((tokens,), {}), MICROBATCHES, step) for step in range(2)
    ]
    return {
        "first": losses[0],
        "second": losses[1],
        **gradients_of(model),
        **dict(model.named_buffers()),
    }


@pytest.mark.mostly_slow(every=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "ranks", "recompute"),
    [("zb-h1", 4, "off"), ("zb-v", 2, "full"), ("dualpipe-v", 2, "full")],
)
def test_bitwise(schedule: str, ranks: int, recompute: str, eager: dict[str, torch.Tensor]) -> None:
    """With recomputation as well: no token is counted twice."""
    model, tokens = model_and_tokens(2 * MICROBATCHES)
    options = {
        "schedule": schedule,
        "ranks": ranks,
        "recompute": recompute,
        "microbatches": MICROBATCHES,
    }
    pipe = zbcompile.pipeline(model, exact=True, **options)
    losses = {"first": pipe.step(tokens), "second": pipe.step(tokens)}
    found = {
        **losses,
        **{n: p.grad for n, p in pipe.named_parameters()},
        **dict(model.named_buffers()),
    }
    assert found.keys() == eager.keys()
    assert [name for name, value in eager.items() if not torch.equal(found[name], value)] == []


@pytest.mark.mostly_slow(every=2)
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "vocab"), [("zb-h1", 1), ("zb-v", 2)])
def test_the_output_layer_of_three_losses_is_sharded(
    schedule: str, vocab: Literal[1, 2], eager: dict[str, torch.Tensor]
) -> None:
    """Two steps, within the bound of sums in another order."""
    model, tokens = model_and_tokens(2 * MICROBATCHES)
    pipe = zbcompile.pipeline(
        model, schedule=schedule, ranks=2, microbatches=MICROBATCHES, vocab=vocab
    )
    losses = {"first": pipe.step(tokens), "second": pipe.step(tokens)}
    assert pipe.program.vocabulary is not None
    for name, value in ({**losses, **{n: p.grad for n, p in pipe.named_parameters()}}).items():
        assert value is not None
        assert (value - eager[name]).abs().max() <= 2e-6 * eager[name].abs().max(), name
    assert all(torch.equal(buffer, eager[name]) for name, buffer in model.named_buffers())
