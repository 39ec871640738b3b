"""The places of gradients: None where eager leaves None, added to what is there, inside tied and
frozen parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zbcompile
from tests.support.oracle import MLP, PROBLEMS, Batch, eager_step
from tests.support.pool import Pool
from tests.support.training import (
    AsEager,
    Case,
    assert_same_tensors,
    gradients_of,
    join,
    pipelined,
    reference,
)

MICROBATCHES = 4


def batch_of(problem: str, size: int = 8) -> Batch:
    return PROBLEMS[problem].batches(1, size)[0]


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("exact", [True, False])
def test_none_where_eager_has_none(exact: bool, pool: Pool) -> None:
    """Frozen, unused and observed parameters: a zero instead of None would be decayed by AdamW."""
    case = Case("frozen", "zb-h1", 2, MICROBATCHES, exact=exact, steps=1)
    theirs = reference(case).gradients[0]
    expected = {name for name, gradient in theirs.items() if gradient is None}
    assert expected == {
        f"{n}.{p}" for n in ("layers.1", "unused", "observed") for p in ("weight", "bias")
    }
    for ours in (pool.alone(pipelined, case), join(pool.run(pipelined, case))):
        assert {
            name for name, gradient in ours.gradients[0].items() if gradient is None
        } == expected


def test_steps_add_to_gradients_that_are_there() -> None:
    """To those from before the first step, and without zero_grad to those of a step."""
    chosen, batch = PROBLEMS["small-tied"], batch_of("small-tied")
    compared = AsEager(chosen.model(), MICROBATCHES, chosen.loss, schedule="zb-h1", ranks=2)
    for parameter in (*compared.model.parameters(), *compared.eager.parameters()):
        parameter.grad = torch.full_like(parameter, 0.25)
    for _ in range(2):
        compared.step(*batch.args, target=batch.target)


def test_gradients_that_are_narrower_than_their_parameters_add_up_as_in_eager() -> None:
    """`grad_dtype` of torch: every microbatch is rounded, and so is each sum."""
    chosen, batch = PROBLEMS["small-tied"], batch_of("small-tied")
    model = chosen.model()
    compared = AsEager(model, MICROBATCHES, chosen.loss, chosen.model(), schedule="zb-h1", ranks=2)
    for parameter in (*model.parameters(), *compared.eager.parameters()):
        parameter.grad_dtype = torch.bfloat16
    for _ in range(2):
        compared.step(*batch.args, target=batch.target)


def freeze_between_steps() -> None:
    """Freezing layers after compiling, then thawing them, does what it does in eager mode."""
    chosen, batch = PROBLEMS["mlp"], batch_of("mlp")
    model, second = chosen.model(), chosen.model()
    pipe = zbcompile.pipeline(
        model, schedule="zb-v", microbatches=MICROBATCHES, loss=chosen.loss, exact=True, ranks=2
    )
    for step, frozen in enumerate((False, True, False)):
        for m in (model, second):
            assert isinstance(m, MLP)
            m.layers[2].requires_grad_(not frozen)
            m.zero_grad()
        pipe.step(*batch.args, target=batch.target)
        eager_step(second, chosen.loss, batch, MICROBATCHES, step)
        theirs = gradients_of(second)
        ours = gradients_of(pipe)
        assert_same_tensors(ours, {name: theirs[name] for name in ours}, "gradient of")


@pytest.mark.slow
def test_freeze_between_steps(pool: Pool) -> None:
    pool.alone(freeze_between_steps)
    pool.run(freeze_between_steps)


def test_sum_instead_of_mean() -> None:
    """`loss_reduction="sum"`: neither the loss nor the gradients carry 1/m."""
    batch = batch_of("mlp")
    model, second = PROBLEMS["mlp"].model(), PROBLEMS["mlp"].model()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target, reduction="sum") / 8

    pipe = zbcompile.pipeline(
        model,
        schedule="zb-h1",
        microbatches=MICROBATCHES,
        ranks=2,
        loss=loss,
        loss_reduction="sum",
        exact=True,
    )
    total = pipe.step(*batch.args, target=batch.target)
    expected = torch.zeros(())
    for part in batch.parts(MICROBATCHES):
        one = loss(second(*part.args), part.target)  # type: ignore[arg-type]
        one.backward()
        expected = expected + one.detach()
    assert torch.equal(total, expected)
    assert_same_tensors(gradients_of(pipe), gradients_of(second), "gradient of")


class Buffered(nn.Module):
    """Batch norm changes buffers in forward, microbatch by microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.BatchNorm1d(32)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def buffers_after_training() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Buffered()
    batch = batch_of("mlp")
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", microbatches=MICROBATCHES, loss=F.mse_loss, exact=True, ranks=2
    )
    pipe.step(*batch.args, target=batch.target)
    return {name: value.clone() for name, value in pipe.state_dict(full=True).items()}


@pytest.mark.slow
def test_buffers_that_forward_changes(pool: Pool) -> None:
    torch.manual_seed(0)
    second = Buffered()
    eager_step(second, F.mse_loss, batch_of("mlp"), MICROBATCHES, 0)
    for ours in (pool.alone(buffers_after_training), *pool.run(buffers_after_training)):
        assert_same_tensors(ours, second.state_dict(), "state dict:")
