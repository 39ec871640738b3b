"""Evaluation equals the model's own output in eval mode, on every rank."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile
from tests.support.oracle import WIDTH, WithLoss
from tests.support.pool import Pool


class Outputs(nn.Module):
    """Dropout, and an output of several kinds of leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, goal: Tensor | None = None) -> dict[str, Any]:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.5, self.training)
        rows = {"rows": x, "pair": (x.mean(1), x.amax(1)), "nothing": None, "name": 3}
        return rows if goal is None else {**rows, "loss": F.mse_loss(x, goal)}


def outputs() -> Outputs:
    torch.manual_seed(0)
    return Outputs()


def rows(size: int) -> Tensor:
    torch.manual_seed(size)
    return torch.randn(size, WIDTH)


def evaluated(sizes: tuple[int, ...], with_loss: bool) -> list[dict[str, Any]]:
    pipe = zbcompile.pipeline(outputs(), schedule="zb-h1", microbatches=4, ranks=2)
    pipe.compile(rows(8), goal=rows(8))
    return [pipe.eval(rows(size), **({"goal": rows(size)} if with_loss else {})) for size in sizes]


def expected(size: int, with_loss: bool) -> dict[str, Any]:
    model = outputs().eval()
    with torch.no_grad():
        return model(rows(size), *([rows(size)] if with_loss else []))


def assert_same_output(ours: Any, theirs: Any) -> None:
    """Equal structure and values; the last bit of a row may depend on how many rows its
    GEMM has."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same_output(ours[key], theirs[key])
    elif isinstance(theirs, tuple):
        for our, their in zip(ours, theirs, strict=True):
            assert_same_output(our, their)
    elif isinstance(theirs, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    else:
        assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    "with_loss", [False, pytest.param(True, marks=pytest.mark.beyond_sample)], ids=["rows", "loss"]
)
def test_output_of_any_structure_for_any_batch_size(with_loss: bool, pool: Pool) -> None:
    """Sizes: what the step takes, one that its microbatches do not divide, a prime, a single
    sample."""
    sizes = (8, 6, 7, 1)
    alone = pool.alone(evaluated, sizes, with_loss)
    for ours, size in zip(alone, sizes, strict=True):
        assert_same_output(ours, expected(size, with_loss))
    for share in pool.run(evaluated, sizes, with_loss):
        for ours, theirs in zip(share, alone, strict=True):
            assert_same_output(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["scalar", "mapping"])
def test_scalar_loss_is_that_of_the_whole_batch(form: str) -> None:
    model = WithLoss(form)
    pipe = zbcompile.pipeline(model, schedule="1f1b", microbatches=4, ranks=2)
    pipe.compile(rows(8), goal=rows(8))
    ours, theirs = pipe.eval(rows(7), goal=rows(7)), model(rows(7), goal=rows(7))
    if form == "mapping":
        ours, theirs = ours["loss"], theirs["loss"]
    assert torch.equal(ours, theirs)


class EvalHead(nn.Module):
    """A head that training never runs: no stage that trains it says where it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return x.square().mean() if self.training else self.head(x)


@pytest.mark.slow
def test_a_head_that_only_evaluation_uses() -> None:
    """It lives on the last stage, after what it works on. Modes and generator stay as they are."""
    model = EvalHead()
    model.body[0].eval()
    pipe = zbcompile.pipeline(model, schedule="1f1b", microbatches=4, ranks=2)
    pipe.step(rows(8))
    generator = torch.get_rng_state()
    output = pipe.eval(rows(8))
    assert torch.equal(generator, torch.get_rng_state())
    assert (model.training, model.body[0].training, model.body[1].training) == (True, False, True)
    assert not output.requires_grad
    torch.testing.assert_close(output, model.eval()(rows(8)).detach())


class OutOfOrder(EvalHead):
    """Evaluation runs the layers backwards."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.body[0](self.body[1](x))


def test_parameters_out_of_order_are_refused() -> None:
    pipe = zbcompile.pipeline(OutOfOrder(), schedule="1f1b", microbatches=4, ranks=2)
    pipe.step(rows(8))
    with pytest.raises(
        zbcompile.PartitionError,
        match="reads its parameters in another order than when it was placed",
    ):
        pipe.eval(rows(8))


class DropConnect(nn.Linear):
    """Training drops weights, so the weight and the bias are read by different operations."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.dropout(self.weight, 0.2, self.training), self.bias)


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("layer", "layers", "ranks"),
    [(spectral, 3, 2), (lambda: DropConnect(8, 8), 2, 3)],
    ids=["spectral", "drop"],
)
def test_no_cut_divides_a_layer_whose_weight_training_computes(
    layer: Any, layers: int, ranks: int
) -> None:
    """Balance alone would cut behind the power iteration, or behind the mask."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(layer(), nn.Tanh()) for _ in range(layers)))
    batch = torch.randn(4, 8)
    pipe = zbcompile.pipeline(
        model, schedule="zb-h1", microbatches=2, ranks=ranks, loss=F.mse_loss, exact=True
    )
    pipe.step(batch, target=batch)
    assert torch.equal(pipe.eval(batch), model.eval()(batch))


class Seen(nn.Module):
    """Counts its calls in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x) * self.calls


@pytest.mark.slow
def test_buffers_that_evaluation_changes_change_once() -> None:
    model = Seen()
    pipe = zbcompile.pipeline(model, schedule="1f1b", microbatches=4, ranks=2, loss=F.mse_loss)
    pipe.step(rows(8), target=rows(8))
    pipe.eval(rows(8))
    assert model.calls == 5  # four microbatches, and one batch as a whole
