"""Steps of other numbers of microbatches than usual, and of microbatches that are already split."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP, Batch, Problem, eager_step
from tests.support.training import assert_same_tensors, gradients_of
from zbcompile.errors import PipelineError
from zbcompile.schedules import build

PROBLEM = Problem(
    lambda: MLP(4),
    torch.nn.functional.mse_loss,
    lambda size: Batch((torch.randn(size, 6, 32),), {}, torch.randn(size, 6, 32)),
)


def rows(count: int) -> Batch:
    return PROBLEM.batches(1, count)[0]


def made(schedule: Any = "zb-h1", **options: Any) -> zbcompile.Pipeline:
    options = {"ranks": 2, "microbatches": 4, "exact": True, **options}
    return zbcompile.pipeline(PROBLEM.model(), schedule=schedule, loss=PROBLEM.loss, **options)


def step(pipe: zbcompile.Pipeline, count: int) -> Tensor:
    return pipe.step(*rows(count).args, target=rows(count).target)  # type: ignore[no-any-return]


def test_a_smaller_batch_takes_fewer_microbatches_and_compiles_nothing() -> None:
    pipe, model = made(), PROBLEM.model()
    for count in (8, 6, 2, 8):
        expected = eager_step(model, PROBLEM.loss, rows(count), max(1, count // 2), 0)
        assert torch.equal(step(pipe, count), expected)
    assert_same_tensors(gradients_of(pipe), gradients_of(model), "gradient of")
    assert len(pipe.compilations) == 1


def split(*sizes: int) -> list[Any]:
    """Microbatches of so many samples, with shorter sequences from one to the next."""
    (x,), target = rows(8).args, rows(8).target
    assert target is not None
    pairs = enumerate(zip(x.split(sizes), target.split(sizes), strict=True))
    return [((x[:, : x.shape[1] - i],), {}, t[:, : t.shape[1] - i]) for i, (x, t) in pairs]


def eagerly(model: nn.Module, parts: list[Any]) -> Tensor:
    losses = []
    for args, _, target in parts:
        losses.append(PROBLEM.loss(model(*args), target) / len(parts))
        losses[-1].backward()
    return sum(losses[1:], losses[0]).detach()


@pytest.mark.slow
def test_microbatches_of_several_shapes_in_one_step() -> None:
    """Also in the first step, which brings its own count."""
    pipe, model = made(microbatches=None), PROBLEM.model()
    for sizes in ((2, 3, 3), (5, 3)):
        parts = split(*sizes)
        assert torch.equal(pipe.step(microbatches=parts), eagerly(model, parts))
    assert_same_tensors(gradients_of(pipe), gradients_of(model), "gradient of")


@pytest.mark.slow
def test_packed_microbatches_share_the_valid_tokens_of_their_batch() -> None:
    """Lengths and masks of their own; the loss is the mean over all tokens that count."""

    def loss(output: Tensor, target: tuple[Tensor, ...]) -> Tensor:
        required, mask, count = target
        return ((output - required).square().mean(-1) * mask).sum() / count

    torch.manual_seed(0)
    sizes, model, eager = (5, 9, 5), MLP(2), MLP(2)
    masks = [(torch.rand(1, length) < 0.7).float() for length in sizes]
    packed = [torch.randn(2, 1, length, 32) for length in sizes]
    count = torch.stack([mask.sum() for mask in masks]).sum()
    eager.load_state_dict(model.state_dict())
    pipe = zbcompile.pipeline(model, schedule="zb-h1", ranks=2, loss=loss, loss_reduction="sum")
    pairs = zip(packed, masks, strict=True)
    ours = pipe.step(microbatches=[((x,), {}, (y, mask, count)) for (x, y), mask in pairs])
    x, y = torch.cat(packed, 2)
    full = loss(eager(x), (y, torch.cat(masks, 1), count))
    full.backward()
    torch.testing.assert_close(ours, full.detach())
    torch.testing.assert_close(gradients_of(pipe), gradients_of(eager))


@pytest.mark.slow
def test_what_a_step_cannot_take() -> None:
    parts, eight = split(2, 2, 2, 2), rows(8).args
    pipe = made("dualpipe-v")
    wrong: list[tuple[Any, Any, str]] = [
        ((), 4, r"microbatches=4; expected one or more .*target.*when the pipeline is made"),
        ((), [parts[0], [parts[1][0]]], r"microbatches\[1\] is a list"),
        (eight, parts, "other inputs were passed as well"),
    ]
    for args, microbatches, reason in wrong:
        with pytest.raises(PipelineError, match=reason):
            pipe.step(*args, microbatches=microbatches)
    with pytest.raises(PipelineError, match="a batch of 6 samples cannot be split into 4 equal"):
        step(pipe, 6)  # nothing is usual yet
    step(pipe, 8)
    with pytest.raises(PipelineError, match="has 3 microbatches, and the schedule dualpipe-v adm"):
        step(pipe, 6)
    with pytest.raises(PipelineError, match="4 shapes, and max_shapes=3"):
        made(max_shapes=3).step(microbatches=parts)
    pipe = made(replace(build("zb-h1", 2, 4), name="mine"))
    step(pipe, 8)
    with pytest.raises(PipelineError, match="the schedule mine is an order for 4 alone"):
        step(pipe, 6)
