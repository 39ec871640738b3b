"""What the joint trace cannot split exactly is refused, and in the default mode split within its bound."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbcompile

WIDTH = 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Recurrent(nn.Module):
    """A recurrent layer between linear ones."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layer = layer(WIDTH, WIDTH, batch_first=True)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(F.relu(self.layer(F.relu(self.before(x)))[0]))


class Thrice(nn.Module):
    """One layer used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.own:
            x = torch.tanh(self.shared(layer(x)))
        return x


class Squared(Thrice):
    """A matrix that one operation reads twice, on several stages, and a bias that all layers share."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.own:
            layer.bias = self.shared.bias

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.own:
            x = torch.tanh(layer(x) @ torch.mm(self.shared.weight, self.shared.weight)) * self.shared.weight[0]
        return x


class Leaky(nn.Module):
    """Slopes drawn at random, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.rrelu(layer(x), training=True)
        return x


class Latents(nn.Module):
    """Views of parameters, each used on several stages: eager adds the gradients of a view before those of others."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.mix = nn.Parameter(torch.randn(5, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        queries, mix = self.queries.expand(len(x), -1, -1), self.mix.T
        for layer in self.layers:
            x = torch.tanh(layer(x) @ mix) * queries + x @ self.mix
        return x


class Turned(nn.Module):
    """Differentiable writes through transposed views, whose gradients are summed in the order of their strides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.rows = nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(33, 33)
        self.ends = nn.ModuleList([nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.ends[0](x.flatten(0, 1)).repeat(4, 1)[:33]
        h = self.a(torch.tanh(x))
        h.T.masked_fill_(h.T > 0.5, 0.0)
        h.T.mul_(self.b(x).T)
        return self.ends[1](self.rows(h.T).T)[:10].view(2, 5, WIDTH)


def gru() -> nn.Module:
    return Recurrent(nn.GRU)


def lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


def train(model: nn.Module, exact: bool, schedule: str = "zb-h1") -> tuple[Tensor, Tensor]:
    """One step of a pipeline; returns its input and target."""
    x, y = torch.randn(8, 5, WIDTH), torch.randn(8, 5, WIDTH)
    pipe = zbcompile.pipeline(model, schedule=schedule, ranks=2, microbatches=4, loss=F.mse_loss, exact=exact)
    pipe.step(x, target=y)
    return x, y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "exact", "message"),
    [
        (gru, True, r"writes in place below autograd.*exact=False"),
        (lstm, False, r"LSTM through oneDNN.*mkldnn.enabled = False.*exact=False"),
    ],
)
def test_refused(make: Callable[[], nn.Module], exact: bool, message: str) -> None:
    with pytest.raises(zbcompile.CompileError, match=message):
        train(make(), exact)


class Pooled(nn.Module):
    """Its pooling changes a view in place: eager copies the gradient into a buffer, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * F.adaptive_avg_pool1d(x, 1)
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (Thrice, "1f1b"),
        (Thrice, "zb-v"),
        (Squared, "zb-h1"),
        (Pooled, "zb-h1"),
        (Leaky, "zb-h1"),
        (Latents, "zb-v"),
        pytest.param(lstm, "1f1b", marks=pytest.mark.beyond_sample),
    ],
)
def test_bitwise(make: Callable[[], nn.Module], schedule: str) -> None:
    """A stage that has several uses of a parameter must not add them before those of later stages are added; writes
    into buffers become copies if these calculate alike."""
    torch.manual_seed(0)
    model, eager = make(), make()
    eager.load_state_dict(model.state_dict())
    with torch.backends.mkldnn.flags(enabled=False):
        x, y = train(model, exact=True, schedule=schedule)
        _accumulate(eager, x, y)
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name


def _accumulate(eager: nn.Module, x: Tensor, y: Tensor) -> None:
    for i, (part, target) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
        torch.manual_seed(zbcompile.microbatch_seed(0, i))
        (F.mse_loss(eager(part), target) / 4).backward()


@pytest.mark.mostly_slow(every=2, suite=1)
@pytest.mark.parametrize("make", [Thrice, gru])
def test_within_the_bound(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, eager = make(), make()
    eager.load_state_dict(model.state_dict())
    x, y = train(model, exact=False)
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.mse_loss(eager(part), target) / 4).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).abs().max() <= 1e-6 * theirs.grad.abs().max()


def test_a_model_without_a_place_to_cut_runs_on_one_rank() -> None:
    torch.manual_seed(0)
    model, eager = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    eager.load_state_dict(model.state_dict())
    x = torch.randn(4, WIDTH)
    zbcompile.pipeline(model, schedule="1f1b", ranks=1, microbatches=1, loss=F.mse_loss, exact=True).step(x, target=x)
    F.mse_loss(eager(x), x).backward()
    assert eager.weight.grad is not None
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, eager.weight.grad)
