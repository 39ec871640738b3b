"""A loss module with parameters trains as a part of the last stage; a model that returns `loss,
outputs`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import MLP, WIDTH
from tests.support.pool import Pool

ROWS = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.scale, target) + self.scale.square() / 10


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return MLP()


def trained(ranks: int | None, schedule: str = "zb-h1") -> dict[str, Tensor]:
    """This process's parameters after two steps."""
    pipe = zbcompile.pipeline(
        seeded(), schedule=schedule, microbatches=4, loss=Temperature(), ranks=ranks, exact=True
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        pipe.step(ROWS, target=ROWS)
        optimizer.step()
        optimizer.zero_grad()
    assert pipe.eval(ROWS).shape == ROWS.shape
    results = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
    pipe.close()
    return results


def expected() -> dict[str, Tensor]:
    model, loss = seeded(), Temperature()
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=0.1)
    for _ in range(2):
        for part in ROWS.chunk(4):
            (loss(model(part), part) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**dict(model.named_parameters()), "loss.scale": loss.scale}


def test_parameters_of_the_loss_train_with_the_bits_of_eager() -> None:
    results, eager = trained(ranks=2), expected()
    assert results.keys() == eager.keys()
    assert all(torch.equal(results[name], eager[name]) for name in eager)


class Normalised(Temperature):
    """Changes its buffers: statistics of a BatchNorm, and a running mean that is a term of the
    loss."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(output.detach().mean() * 0.1)
        return super().forward(self.norm(output), target) + self.mean


class Owner(nn.Module):
    """Has its loss from the beginning, under a name of its own, and does not run it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.criterion = MLP(), Normalised()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.slow
@pytest.mark.mostly_slow(every=2)
@pytest.mark.parametrize("own", [False, True])
def test_the_loss_changes_its_buffers(own: bool) -> None:
    torch.manual_seed(0)
    model = Owner() if own else MLP()
    loss = model.criterion if isinstance(model, Owner) else Normalised()
    eager, eagers_loss = copy.deepcopy((model, loss))
    if own:
        eagers_loss = eager.criterion
    pipe = zbcompile.pipeline(
        model, schedule="1f1b", microbatches=2, loss=loss, ranks=2, exact=True
    )
    for _ in range(2):
        total = torch.zeros(())
        for part in ROWS.chunk(2):
            item = eagers_loss(eager(part), part) / 2
            item.backward()
            total += item.detach()
        assert torch.equal(pipe.step(ROWS, target=ROWS), total)
    for (name, ours), (_, theirs) in zip(
        loss.named_buffers(), eagers_loss.named_buffers(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    gradients = {
        name: item.grad
        for name, item in (*eager.named_parameters(), *eagers_loss.named_parameters("loss"))
    }
    assert all(torch.equal(item.grad, gradients[name]) for name, item in pipe.named_parameters())
    pipe.close()


class Counting(nn.Module):
    """A loss without parameters, which changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        return F.mse_loss(output, target)


class Normalising(nn.Module):
    """A loss without parameters, which has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.norm(output), target)


@pytest.mark.parametrize("kind", [Counting, Normalising])
def test_buffers_that_a_loss_without_parameters_changes_are_refused(kind: type[nn.Module]) -> None:
    pipe = zbcompile.pipeline(seeded(), schedule="1f1b", microbatches=2, loss=kind(), ranks=2)
    with pytest.raises(
        zbcompile.CaptureError,
        match=r"loss module changes its buffer .* which belongs to no stage.*model\.loss = loss",
    ):
        pipe.step(ROWS, target=ROWS)


def test_a_sequence_that_would_run_the_loss_is_refused() -> None:
    with pytest.raises(zbcompile.CaptureError, match="runs all its submodules"):
        zbcompile.pipeline(nn.Sequential(seeded()), schedule="1f1b", ranks=2, loss=Temperature())


@pytest.mark.slow
def test_the_last_rank_has_the_parameters_of_the_loss(pool: Pool) -> None:
    first, last = pool.run(trained, None, ranks=2)
    eager = expected()
    assert "loss.scale" not in first
    assert all(torch.equal((first | last)[name], eager[name]) for name in eager)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = seeded()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output = self.inner(x)
        return F.mse_loss(output, x), output


def test_a_model_that_returns_its_loss_and_logits() -> None:
    pipe = zbcompile.pipeline(Both(), schedule="1f1b", microbatches=4, ranks=2, exact=True)
    loss, (_, output) = pipe.step(ROWS, return_outputs=True)
    losses, outputs = zip(*map(Both(), ROWS.chunk(4)), strict=True)
    assert torch.equal(output, torch.cat(outputs))
    assert torch.equal(loss, sum(part / 4 for part in losses))


class Looking(MLP):
    """Its output depends on all that it is made of."""

    def forward(self, x: Tensor) -> Tensor:
        seen = sum(item.square().sum() for item in self.parameters())
        count = len([*self.children(), *self.modules(), *self.state_dict()])
        return super().forward(x) * (1 + seen + count + hasattr(self, "loss"))


@pytest.mark.slow
def test_forward_sees_no_loss_that_its_model_does_not_have() -> None:
    torch.manual_seed(0)
    model, loss = Looking(), Temperature()
    eager, eagers_loss = copy.deepcopy((model, loss))
    options = {"schedule": "1f1b", "microbatches": 2, "ranks": 2, "exact": True}
    pipe = zbcompile.pipeline(model, loss=loss, **options)
    for _ in range(2):
        losses = [eagers_loss(eager(part), part) / 2 for part in ROWS.chunk(2)]
        assert torch.equal(pipe.step(ROWS, target=ROWS), sum(item.detach() for item in losses))
        for item in losses:
            item.backward()
    theirs = {name: item.grad for name, item in eager.named_parameters()}
    theirs["loss.scale"] = eagers_loss.scale.grad
    assert all(torch.equal(item.grad, theirs[name]) for name, item in pipe.named_parameters())
    torch.testing.assert_close(pipe.eval(ROWS), eager.eval()(ROWS).detach())


class CallsItsLoss(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.inner, self.loss = seeded(), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.inner(x), x)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_loss_that_is_joined_with_one_model_is_seen_by_another_that_has_it() -> None:
    loss, options = Temperature(), {"schedule": "1f1b", "microbatches": 2, "ranks": 2}
    zbcompile.pipeline(seeded(), loss=loss, **options).close()
    pipe = zbcompile.pipeline(CallsItsLoss(loss), exact=True, **options)
    expected = sum(loss(seeded()(part), part).detach() / 2 for part in ROWS.chunk(2))
    assert torch.equal(pipe.step(ROWS), expected)
