"""A loss module with parameters trains as a part of the last stage; a model that returns `loss,
outputs`."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP, WIDTH
from tests.support.training import assert_same_tensors

ROWS = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)
OPTIONS: dict[str, Any] = {"schedule": "zb-h1", "microbatches": 4, "exact": True}


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.scale, target) + self.scale.square() / 10


class Short(MLP):
    def __init__(self) -> None:
        super().__init__(2)


def seeded(kind: type[Short] = Short) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.slow
def test_parameters_of_the_loss_train_with_the_bits_of_eager() -> None:
    model, loss = seeded(), Temperature()
    pipe = zbcompile.pipeline(seeded(), loss=Temperature(), ranks=2, **OPTIONS)
    ours = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    theirs = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=0.1)
    for _ in range(2):
        pipe.step(ROWS, target=ROWS)
        for part in ROWS.chunk(4):
            (loss(model(part), part) / 4).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    expected = {**dict(model.named_parameters()), "loss.scale": loss.scale}
    assert_same_tensors(dict(pipe.named_parameters()), expected, "parameter")
    assert pipe.eval(ROWS).shape == ROWS.shape


class Normalised(Temperature):
    """Changes its buffers: statistics of a BatchNorm, and a mean that is a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(output.detach().mean() * 0.1)  # type: ignore[operator,union-attr]
        return super().forward(self.norm(output), target) + self.mean


class Owner(Short):
    """Has its loss from the beginning, under a name of its own, and does not run it."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = Normalised()


class Looking(Short):
    """Its output depends on all that it is made of, of which the loss is none."""

    def forward(self, x: Tensor) -> Tensor:
        seen = sum(item.square().sum() for item in self.parameters())
        count = len([*self.children(), *self.modules(), *self.state_dict()])
        return super().forward(x) * (1 + seen + count + hasattr(self, "loss"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Owner, Looking])
def test_the_loss_changes_its_buffers_and_forward_does_not_see_it(kind: type[Short]) -> None:
    model: Any = seeded(kind)
    eager, their_loss = copy.deepcopy((model, loss := getattr(model, "criterion", Normalised())))
    their_loss = getattr(eager, "criterion", their_loss)
    pipe = zbcompile.pipeline(model, loss=loss, ranks=2, **OPTIONS)
    for _ in range(2):
        losses = [their_loss(eager(part), part) / 4 for part in ROWS.chunk(4)]
        assert torch.equal(pipe.step(ROWS, target=ROWS), sum(item.detach() for item in losses))
        for item in losses:
            item.backward()
    assert_same_tensors(dict(loss.named_buffers()), dict(their_loss.named_buffers()), "buffer")
    named = dict((*eager.named_parameters(), *their_loss.named_parameters("loss")))
    assert all(torch.equal(item.grad, named[name].grad) for name, item in pipe.named_parameters())


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(WIDTH, affine=False), None])
def test_a_loss_that_cannot_be_a_part_of_the_model_is_refused(norm: nn.Module | None) -> None:
    """It changes buffers and has no parameters; or the model is a sequence, which would run it."""

    class Changing(nn.MSELoss):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return super().forward(self.norm(output), target)

    changing: Any = Changing() if norm else Temperature()
    changing.norm = norm
    refused = (
        r"changes its buffer .* belongs to no stage.*model\.loss = loss" if norm else "runs all"
    )
    model = seeded() if norm else nn.Sequential(seeded())
    with pytest.raises(zbcompile.CaptureError, match=refused):
        zbcompile.pipeline(model, loss=changing, ranks=2, **OPTIONS).step(ROWS, target=ROWS)


class CallsItsLoss(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.inner, self.loss = seeded(), loss

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = self.inner(x)
        return self.loss(output, x), output


def test_a_model_that_returns_its_loss_and_logits() -> None:
    """Its loss was joined with another model before."""
    loss = Temperature()
    zbcompile.pipeline(seeded(), loss=loss, ranks=2, **OPTIONS).close()
    pipe = zbcompile.pipeline(CallsItsLoss(loss), ranks=2, **OPTIONS)
    total, (_, output) = pipe.step(ROWS, return_outputs=True)
    losses, outputs = zip(*map(CallsItsLoss(loss), ROWS.chunk(4)), strict=True)
    assert torch.equal(output, torch.cat(outputs))
    assert torch.equal(total, sum(part / 4 for part in losses))
