"""Steps of other numbers of microbatches than usual, and of microbatches that are already split."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import zbcompile
from tests.support.oracle import MLP, PROBLEMS, Batch, eager_step
from zbcompile.errors import PipelineError
from zbcompile.schedules import build

PROBLEM = PROBLEMS["small-tied"]
(EIGHT,) = PROBLEM.batches(1, 8)
Part = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor], torch.Tensor]


def rows(count: int) -> Batch:
    (batch,) = PROBLEM.batches(1, count)
    return batch


def made(schedule: str = "zb-h1", **options: object) -> zbcompile.Pipeline:
    options = {"ranks": 2, "microbatches": 4, "exact": True, **options}
    return zbcompile.pipeline(PROBLEM.model(), schedule=schedule, loss=PROBLEM.loss, **options)  # type: ignore[call-overload]


def gradients(pipe: zbcompile.Pipeline) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in pipe.named_parameters()}


def same(pipe: zbcompile.Pipeline, model: nn.Module) -> bool:
    expected = dict(model.named_parameters())
    return all(torch.equal(grad, expected[name].grad) for name, grad in gradients(pipe).items())  # type: ignore[arg-type]


@pytest.mark.mostly_slow(every=3)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_a_smaller_batch_takes_fewer_microbatches_and_compiles_nothing(schedule: str) -> None:
    pipe, model = made(schedule), PROBLEM.model()
    for count in (8, 6, 2, 8):
        loss = pipe.step(*rows(count).args, target=rows(count).target)
        assert torch.equal(
            loss, eager_step(model, PROBLEM.loss, rows(count), max(1, count // 2), 0)
        )
    assert same(pipe, model)
    assert len(pipe.compilations) == 1


def split(batch: Batch, *sizes: int) -> list[Part]:
    """Microbatches of so many samples, with shorter sequences from one to the next."""
    assert batch.target is not None
    pairs = zip(batch.args[0].split(list(sizes)), batch.target.split(list(sizes)), strict=True)
    return [
        ((x[:, : x.shape[1] - i],), {}, t[:, : t.shape[1] - i]) for i, (x, t) in enumerate(pairs)
    ]


def eagerly(model: nn.Module, parts: list[Part]) -> torch.Tensor:
    losses = []
    for args, kwargs, target in parts:
        loss = PROBLEM.loss(model(*args, **kwargs), target) / len(parts)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return torch.stack(losses).sum() if len(losses) < 2 else sum(losses[1:], losses[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", [pytest.param("zb-v", marks=pytest.mark.beyond_sample), "zb-h1"]
)
def test_microbatches_of_several_shapes_in_one_step(schedule: str) -> None:
    pipe, model = made(schedule), PROBLEM.model()
    for sizes in ((2, 2, 2, 2), (3, 1, 4), (2, 2, 2, 2)):
        parts = split(EIGHT, *sizes)
        assert torch.equal(pipe.step(microbatches=parts), eagerly(model, parts))
    assert same(pipe, model)
    assert len(pipe.compilations) == 4 + 3


@pytest.mark.slow
def test_packed_microbatches_share_the_valid_tokens_of_their_batch() -> None:
    """Lengths and masks of their own; the loss is the mean over all tokens that count, whoever
    holds them."""

    def loss(output: torch.Tensor, target: tuple[torch.Tensor, ...]) -> torch.Tensor:
        required, mask, count = target
        return ((output - required).square().mean(-1) * mask).sum() / count

    torch.manual_seed(0)
    masks = [(torch.rand(1, length) < 0.7).float() for length in (5, 9, 5)]
    packed = [(torch.randn(1, length, 32), torch.randn(1, length, 32)) for length in (5, 9, 5)]
    count = torch.stack([mask.sum() for mask in masks]).sum()
    options = {"ranks": 2, "loss": loss, "loss_reduction": "sum"}
    model, eager = MLP(2), MLP(2)
    eager.load_state_dict(model.state_dict())
    pipe = zbcompile.pipeline(model, schedule="zb-h1", **options)  # type: ignore[call-overload]
    results = pipe.step(
        microbatches=[
            ((x,), {}, (y, mask, count)) for (x, y), mask in zip(packed, masks, strict=True)
        ]
    )
    x, y = (torch.cat(item, 1) for item in zip(*packed, strict=True))
    full = loss(eager(x), (y, torch.cat(masks, 1), count))
    full.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(results, full.detach())
    torch.testing.assert_close(
        gradients(pipe), {name: p.grad for name, p in eager.named_parameters()}
    )


@pytest.mark.slow
def test_what_a_step_cannot_take() -> None:
    parts = split(EIGHT, 2, 2, 2, 2)
    pipe = made("dualpipe-v")
    with pytest.raises(
        PipelineError,
        match=r"microbatches=4; expected one or more .*target.*when the pipeline is made",
    ):
        pipe.step(microbatches=4)  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match=r"microbatches\[1\] is a list"):
        pipe.step(microbatches=[parts[0], [parts[1][0]]])  # type: ignore[list-item]
    with pytest.raises(PipelineError, match="other inputs were passed as well"):
        pipe.step(*EIGHT.args, microbatches=parts)
    with pytest.raises(PipelineError, match="a batch of 6 samples cannot be split into 4 equal"):
        pipe.step(*rows(6).args, target=rows(6).target)  # nothing is usual yet
    pipe.step(*EIGHT.args, target=EIGHT.target)
    with pytest.raises(
        PipelineError, match=r"has 3 microbatches, and the schedule dualpipe-v admits 4, 5, 6"
    ):
        pipe.step(*rows(6).args, target=rows(6).target)
    with pytest.raises(PipelineError, match="4 shapes, and max_shapes=3"):
        made(max_shapes=3).step(microbatches=parts)
    local = replace(build("zb-h1", 2, 4), name="mine")
    pipe = zbcompile.pipeline(PROBLEM.model(), schedule=local, loss=PROBLEM.loss, ranks=2)
    pipe.step(*EIGHT.args, target=EIGHT.target)
    with pytest.raises(PipelineError, match="the schedule mine is an order for 4 alone"):
        pipe.step(*rows(6).args, target=rows(6).target)


@pytest.mark.slow
def test_the_first_step_may_bring_its_own_count() -> None:
    pipe, model = made(microbatches=None), PROBLEM.model()
    parts = split(EIGHT, 2, 3, 3)
    assert torch.equal(pipe.step(microbatches=parts), eagerly(model, parts))
    assert pipe.program.schedule.microbatches == 3
    assert same(pipe, model)
